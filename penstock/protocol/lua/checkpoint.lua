-- checkpoint: keep a running sample's prefix, so that another worker can continue it (worker).
-- KEYS: group:JOB, partial:SAMPLE
-- ARGV: prefix, token, k, record, seconds it is kept, report of tokens (`LIVE,BEHIND_STOP,REWOUND,LOST_TURN,UNHEARD`;
-- '': none)
-- Returns: 1, or 0 when the lease is lost
-- Atomic because a worker that lost its lease must not overwrite its successor's prefix (I3).
local group_key, partial_key = KEYS[1], KEYS[2]
local prefix, token, k, record, ttl_s, told = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5], ARGV[6]

local g = redis.call('HMGET', group_key, 'st', 'tok', 'ln')
if g[1] ~= 'leased' or g[2] ~= token then return 0 end
redis.call('SET', partial_key, record, 'EX', ttl_s)
redis.call('HSET', group_key, 'pf', '1')
tell(prefix, group_key, g[3], k, told, true)
return 1
