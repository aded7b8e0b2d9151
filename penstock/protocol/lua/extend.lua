-- extend: append tokens to a running sample's prefix (worker).
-- KEYS: group:JOB, partial:SAMPLE
-- ARGV: prefix, token, k, bytes of the stored prefix, record, seconds it is kept, most bytes of a prefix,
--       report of tokens (`LIVE,BEHIND_STOP,REWOUND,LOST_TURN,UNHEARD`; '': none)
-- Returns: 'kept' | 'lost' (the lease) | 'other' (other bytes are stored: write the complete prefix) | 'full'
-- Atomic because a worker that lost its lease must not touch its successor's prefix (I3), and because a record that is
-- sent again after a lost reply must not be appended twice: only the holder writes, so the length decides.
local group_key, partial_key = KEYS[1], KEYS[2]
local prefix, token, k, before, record = ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[4]), ARGV[5]
local ttl_s, max_bytes, told = ARGV[6], tonumber(ARGV[7]), ARGV[8]

local g = redis.call('HMGET', group_key, 'st', 'tok', 'ln')
if g[1] ~= 'leased' or g[2] ~= token then return 'lost' end
local there = redis.call('STRLEN', partial_key)
if there == before + #record then return 'kept' end
if there ~= before then return 'other' end
if before + #record > max_bytes then return 'full' end
redis.call('APPEND', partial_key, record)
redis.call('EXPIRE', partial_key, ttl_s)
tell(prefix, group_key, g[3], k, told, true)
return 'kept'
