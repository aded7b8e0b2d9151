-- swap: change a number of the source if it still is what the caller read (producer).
-- KEYS: source
-- ARGV: prefix, field, number it was read as (absent counts as 0), number it becomes
-- Returns: the number after the call
-- Atomic because two producers must continue with the same evaluation.
local source_key = KEYS[1]
local prefix, name, expected, number = ARGV[1], ARGV[2], ARGV[3], ARGV[4]

freeing(prefix)
local now = redis.call('HGET', source_key, name) or '0'
if now ~= expected then return tonumber(now) end
redis.call('HSET', source_key, name, number)
return tonumber(number)
