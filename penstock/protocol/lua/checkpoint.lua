-- checkpoint: a running sample's prefix is kept, so that another worker can go on from it (worker).
-- KEYS: group:JOB, partial:SAMPLE
-- ARGV: token, record, seconds it is kept
-- Returns: 1, or 0 when the lease is lost
-- Atomic because a worker that lost its lease must not overwrite its successor's prefix (I3).
local g = redis.call('HMGET', KEYS[1], 'st', 'tok')
if g[1] ~= 'leased' or g[2] ~= ARGV[1] then return 0 end
redis.call('SET', KEYS[2], ARGV[2], 'EX', ARGV[3])
redis.call('HSET', KEYS[1], 'pf', '1')
return 1
