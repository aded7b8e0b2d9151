-- swap: a number of the source moves, if it still is what the caller read (producer).
-- KEYS: source
-- ARGV: prefix, field, number it was read as (absent counts as 0), number it becomes
-- Returns: the number that is there now
-- Atomic because two producers must go on with the same evaluation.
freeing(ARGV[1])
local now = redis.call('HGET', KEYS[1], ARGV[2]) or '0'
if now ~= ARGV[3] then return tonumber(now) end
redis.call('HSET', KEYS[1], ARGV[2], ARGV[4])
return tonumber(ARGV[4])
