-- transfer_enroll: a worker is ready to receive a version (worker).
-- KEYS: transfer:MODEL
-- ARGV: prefix, id (VERSION-REV), worker, record
-- Returns: 'open' when the worker is enrolled; 'closed' when that was decided without it, or is of another version
-- Atomic because nobody may be enrolled after the decision who is not in it.
freeing(ARGV[1])
local t = redis.call('HMGET', KEYS[1], 'id', 'st')
if t[1] ~= ARGV[2] or t[2] ~= 'open' then return 'closed' end
redis.call('HSET', KEYS[1], 'm:' .. ARGV[3], ARGV[4])
return 'open'
