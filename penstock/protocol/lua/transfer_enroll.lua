-- transfer_enroll: a worker is ready to receive a version (worker).
-- KEYS: transfer:MODEL
-- ARGV: prefix, id (VERSION-REV), worker, record
-- Returns: 'open' when the worker is enrolled; 'closed' when the decision was made, or the transfer is of another
-- version
-- Atomic because a worker that is not in the decision must not be enrolled after it.
local transfer_key = KEYS[1]
local prefix, id, worker, record = ARGV[1], ARGV[2], ARGV[3], ARGV[4]

freeing(prefix)
local t = redis.call('HMGET', transfer_key, 'id', 'st')
if t[1] ~= id or t[2] ~= 'open' then return 'closed' end
redis.call('HSET', transfer_key, 'm:' .. worker, record)
return 'open'
