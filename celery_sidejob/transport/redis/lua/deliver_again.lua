-- Takes a message out of the dead list and puts it into its own, where it is served last, and rings the queue's bell.
--
-- KEYS: the dead list, the list, the bell
-- ARGV: the entry of the dead list, the message, how long a bell is kept (ms)
-- Returns whether it was there: of two who try, one succeeds.
-- An error of a push leaves the entry where it is.
local dead, list, bell = KEYS[1], KEYS[2], KEYS[3]

if redis.call('LPOS', dead, ARGV[1]) == false then
    return 0
end
redis.call('LPUSH', list, ARGV[2])
redis.call('LREM', dead, 1, ARGV[1])
if redis.call('EXISTS', bell) == 0 then
    redis.call('LPUSH', bell, '')
    redis.call('PEXPIRE', bell, ARGV[3])
end
return 1
