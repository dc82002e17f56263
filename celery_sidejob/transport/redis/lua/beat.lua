-- Says that consumers are alive, and asks which others are not; rings for messages whose publishers ring no bell.
--
-- KEYS: the consumers, those being recovered, the era of what Redis has, the bell of each queue that is waited for, the
--       lists of each (all priorities of the first queue, of the second, ...)
-- ARGV: for how long they count as alive (ms), for how long a dead one is left to its finder (ms), how many dead ones
--       at most, how long a bell is kept (ms), how many queues, how many priorities, the era if this Redis has none
--       yet, then each consumer
-- Returns those of them that were taken for dead, the dead ones that the caller is to recover, and the era.
local consumers, recovering, era_key = KEYS[1], KEYS[2], KEYS[3]
local lease_ms, claim_ms, at_most, bell_ms = tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3]), ARGV[4]
local queues, steps = tonumber(ARGV[5]), tonumber(ARGV[6])
local now = redis.call('TIME')
local now_ms = now[1] * 1000 + math.floor(now[2] / 1000)

-- A script that has written may go on writing on a full server, where this is refused as a first write. To be taken for
-- dead for a lack of memory would double what runs.
redis.call('ZREM', recovering, '')

local era = redis.call('GET', era_key)
if not era then
    era = ARGV[7]
    redis.call('SET', era_key, era)
end

local lost, claimed = {}, {}
for i = 8, #ARGV do
    if redis.call('ZSCORE', consumers, ARGV[i]) then
        redis.call('ZADD', consumers, now_ms + lease_ms, ARGV[i])
    else -- only a fetch registers: a beat that comes late does not bring back who has left
        lost[#lost + 1] = ARGV[i]
    end
end

for _, dead in ipairs(redis.call('ZRANGEBYSCORE', consumers, '-inf', now_ms, 'LIMIT', 0, 200)) do
    if #claimed == at_most then
        break
    end
    local until_ms = redis.call('ZSCORE', recovering, dead)
    if not until_ms or tonumber(until_ms) <= now_ms then
        redis.call('ZADD', recovering, now_ms + claim_ms, dead)
        claimed[#claimed + 1] = dead
    end
end

for queue = 1, queues do
    local bell, first = KEYS[3 + queue], 3 + queues + (queue - 1) * steps
    if redis.call('EXISTS', unpack(KEYS, first + 1, first + steps)) > 0 and redis.call('EXISTS', bell) == 0 then
        redis.call('LPUSH', bell, '')
        redis.call('PEXPIRE', bell, bell_ms)
    end
end
return {lost, claimed, era}
