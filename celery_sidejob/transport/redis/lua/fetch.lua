-- Takes messages out of their lists and into the consumer's own record, and registers the consumer: all or nothing.
--
-- KEYS: the consumers, the consumer's record, the lists (of the first priority each queue's, of the second, ...), the
--       bell of each queue
-- ARGV: the consumer, the number of this fetch, how many messages at most, for how long the consumer counts as alive
--       (ms), how many queues, how many priorities, whether a queue that was served goes to the end of their order (0
--       or 1), for each queue whether what is taken is not recorded (a text of 0 and 1), how long a bell is kept (ms)
-- A message whose consumer died or left after it had begun is delivered alone: nothing else in the same fetch.
-- Returns the number of the queue and the message, and so on, in the order in which they are to be delivered. The token
-- of the n-th is the number of this fetch, a dot and n.
local consumers, record = KEYS[1], KEYS[2]
local consumer, fetch, wanted, lease_ms = ARGV[1], ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4])
local queues, steps, rotates, unrecorded = tonumber(ARGV[5]), tonumber(ARGV[6]), ARGV[7] == '1', ARGV[8]
local AT_ONCE = 100

local function list_of(step, queue)
    return KEYS[2 + (step - 1) * queues + queue]
end

-- The queues with messages of a priority. Most lists of most queues are empty, and hundreds are ruled out by one look.
local function waiting(step)
    local found = {}
    for first = 1, queues, AT_ONCE do
        local last = math.min(first + AT_ONCE - 1, queues)
        local base = 2 + (step - 1) * queues
        if redis.call('EXISTS', unpack(KEYS, base + first, base + last)) > 0 then
            for queue = first, last do
                if redis.call('EXISTS', list_of(step, queue)) == 1 then
                    found[#found + 1] = queue
                end
            end
        end
    end
    return found
end

local function is_suspect(message)
    return message:find('"delivery_suspect"', 1, true) ~= nil
end

local taken, served, failure = {}, {}, nil

-- Takes the oldest message of a list; false if there is none. Once it is off its list nothing may fail any more, and
-- nothing does: Redis refuses a script its first write or none.
local function take(step, queue)
    local list, is_recorded = list_of(step, queue), unrecorded:sub(queue, queue) == '0'
    if #taken > 0 and is_recorded then
        local next = redis.pcall('LINDEX', list, -1)
        if type(next) == 'string' and is_suspect(next) then
            wanted = #taken / 2
            return false
        end
    end
    local message = redis.pcall('RPOP', list)
    if type(message) == 'table' then
        failure = message
        return false
    end
    if not message then
        return false
    end
    local number = #taken / 2 + 1
    if is_recorded then
        if is_suspect(message) then
            wanted = 1
        end
        redis.call('HSET', record, fetch .. '.' .. number, #list .. ':' .. list .. message)
    end
    taken[#taken + 1] = queue
    taken[#taken + 1] = message
    served[queue] = number
    return true
end

-- A long backlog is taken in batches, a short one is left for the others too, who may have nothing to do.
local function share(list)
    local length = redis.pcall('LLEN', list)
    local others = redis.call('ZCARD', consumers)
    return type(length) == 'number' and math.ceil(length / math.max(others, 1)) or 1
end

local step = 1
while step <= steps and #taken / 2 < wanted do
    local left = waiting(step)
    if #taken == 0 and #left > 0 then
        wanted = math.min(wanted, share(list_of(step, left[1])))
    end
    if rotates then -- those served are at the end of the order now, the last one last
        table.sort(left, function(one, other)
            local a, b = served[one] or 0, served[other] or 0
            return a < b or (a == b and one < other)
        end)
    end
    while #left > 0 and #taken / 2 < wanted do
        local queue = table.remove(left, 1)
        if take(step, queue) then
            table.insert(left, rotates and #left + 1 or 1, queue)
        end
    end
    step = step + 1
end

-- What is left is for others, of whom this may have taken the bell.
if #taken / 2 >= wanted then
    for other = step - 1, steps do
        for _, queue in ipairs(waiting(other)) do
            local bell = KEYS[2 + steps * queues + queue]
            if redis.call('EXISTS', bell) == 0 then
                redis.call('LPUSH', bell, '')
                redis.call('PEXPIRE', bell, ARGV[9])
            end
        end
    end
end

-- With nothing taken this is the first write, which a full server refuses: then there is nothing to be alive for.
if unrecorded:find('0', 1, true) then
    local now = redis.call('TIME')
    local until_ms = now[1] * 1000 + math.floor(now[2] / 1000) + lease_ms
    redis.pcall('ZADD', consumers, until_ms, consumer)
end
if failure and #taken == 0 then
    return failure
end
return taken
