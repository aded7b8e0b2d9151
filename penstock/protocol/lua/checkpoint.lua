-- checkpoint: a running sample's prefix is kept, so that another worker can go on from it (worker).
-- KEYS: group:JOB, partial:SAMPLE
-- ARGV: token, record, seconds it is kept
-- Returns: 1, or 0 when the lease is lost
-- Atomic because a worker that lost its lease must not overwrite its successor's prefix (I3).
local group_key, partial_key = KEYS[1], KEYS[2]
local token, record, ttl_s = ARGV[1], ARGV[2], ARGV[3]

local g = redis.call('HMGET', group_key, 'st', 'tok')
if g[1] ~= 'leased' or g[2] ~= token then return 0 end
redis.call('SET', partial_key, record, 'EX', ttl_s)
redis.call('HSET', group_key, 'pf', '1')
return 1
