-- swap: a number of the source moves, if it still is what the caller read (producer).
-- KEYS: source
-- ARGV: field, number it was read as (absent counts as 0), number it becomes
-- Returns: the number that is there now
-- Atomic because two producers must go on with the same evaluation.
local now = redis.call('HGET', KEYS[1], ARGV[1]) or '0'
if now ~= ARGV[2] then return tonumber(now) end
redis.call('HSET', KEYS[1], ARGV[1], ARGV[3])
return tonumber(ARGV[3])
