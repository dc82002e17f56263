-- Notes which messages of a consumer wait to be begun, and which do so no more.
--
-- KEYS: the consumers, those messages
-- ARGV: the consumer, how many tokens are new, these tokens, then those that go
-- Returns whether the consumer is registered: nothing is noted of one that has left.
if not redis.call('ZSCORE', KEYS[1], ARGV[1]) then
    return 0
end
local last_new = 2 + tonumber(ARGV[2])
for i = 3, #ARGV do
    redis.call(i <= last_new and 'SADD' or 'SREM', KEYS[2], ARGV[i])
end
return 1
