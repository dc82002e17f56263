-- Takes messages from a consumer's record back to the head of their lists, or to the dead list, and rings the bells.
--
-- Given newest first they lie oldest first. What the consumer no longer has is passed over: each goes back once,
-- whoever tries.
--
-- KEYS: the consumers, those being recovered, the consumer's record, the dead list, which of the record's messages wait
--       to be begun, the lists, the bell of each list
-- ARGV: the consumer, `give_back` (some messages of a consumer that goes on), `send_back` (the same, behind those that
--       came back before), `leave` (it ends) or `recover` (only if it is dead), how long a bell is kept (ms), how many
--       lists, then for each message its token, the number of its list (0 is the dead list) and its text
-- Returns the tokens of those that went back; false if the consumer is not dead.
local consumers, recovering, record, dead, waiting = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5]
local consumer, why, bell_ms, lists = ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[4])

if why == 'recover' then
    local now = redis.call('TIME')
    local until_ms = redis.call('ZSCORE', consumers, consumer)
    if until_ms and tonumber(until_ms) > now[1] * 1000 + math.floor(now[2] / 1000) then
        return false
    end
end

-- A script that has written may go on writing on a full server, where pushing first is refused; this changes nothing.
redis.call('HDEL', record, '')

local MOST_AHEAD = 100

local function is_back(text)
    return type(text) == 'string' and text:find('"redelivered":%s*true') ~= nil
end

-- Moves the message at the head of a list behind the others there that came back before it. By LSET: a list whose last
-- message is taken out forgets when it expires.
local function let_pass(list, text)
    local place = -1
    while place >= -MOST_AHEAD do
        local next = redis.call('LINDEX', list, place - 1)
        if not is_back(next) then
            break
        end
        redis.call('LSET', list, place, next)
        place = place - 1
    end
    if place < -1 then
        redis.call('LSET', list, place, text)
    end
end

local gone, touched = {}, {}
for i = 5, #ARGV, 3 do
    local token, list, text = ARGV[i], tonumber(ARGV[i + 1]), ARGV[i + 2]
    if redis.call('HEXISTS', record, token) == 1 then
        local pushed = redis.pcall('RPUSH', list == 0 and dead or KEYS[5 + list], text)
        if type(pushed) == 'number' then -- else its list has become something else: it stays where it is
            redis.call('HDEL', record, token)
            if why == 'send_back' and list > 0 then
                let_pass(KEYS[5 + list], text)
            end
            gone[#gone + 1] = token
            touched[list] = true
        end
    end
end
for list = 1, lists do
    local bell = KEYS[5 + lists + list]
    if touched[list] and redis.call('EXISTS', bell) == 0 then
        redis.call('LPUSH', bell, '')
        redis.call('PEXPIRE', bell, bell_ms)
    end
end
if (why == 'leave' or why == 'recover') and redis.call('EXISTS', record) == 0 then
    redis.call('ZREM', consumers, consumer)
    redis.call('ZREM', recovering, consumer)
    redis.call('DEL', waiting)
end
return gone
