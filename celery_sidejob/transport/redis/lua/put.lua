-- Puts a message into its list, as kombu does, and rings the bell of the queue: somebody may be waiting.
--
-- KEYS: the list, the bell, then the lists whose expiry is put off
-- ARGV: how long a bell is kept (ms), how long the lists are (ms), the message
redis.call('LPUSH', KEYS[1], ARGV[3])
for i = 3, #KEYS do
    redis.call('PEXPIRE', KEYS[i], ARGV[2])
end
if redis.call('EXISTS', KEYS[2]) == 0 then
    redis.call('LPUSH', KEYS[2], '')
    redis.call('PEXPIRE', KEYS[2], ARGV[1])
end
