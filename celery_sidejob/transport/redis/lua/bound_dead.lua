-- Drops the oldest entries of the dead list while it is too long, or they are too old.
--
-- KEYS: the dead list
-- ARGV: how many entries are kept (-1 for any number), since when (Unix time; entries that tell no time are older), how
--       many go in one script
-- Returns those that went.
local dead = KEYS[1]
local limit, since, at_most = tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3])

-- Not by cjson, to which not all is JSON that Python writes. Within a string of JSON this key would have backslashes.
local function at(text)
    return tonumber(text:match('"at": ([%d.e+-]+)')) or 0
end

local gone = {}
while #gone < at_most do
    local oldest = redis.call('LINDEX', dead, 0)
    if not oldest then
        break
    end
    local is_beyond = limit >= 0 and redis.call('LLEN', dead) > limit
    if not is_beyond and at(oldest) >= since then
        break
    end
    redis.call('LPOP', dead)
    gone[#gone + 1] = oldest
end
return gone
