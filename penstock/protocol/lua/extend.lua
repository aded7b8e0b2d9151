-- extend: what was drawn since is put behind a running sample's prefix (worker).
-- KEYS: group:JOB, partial:SAMPLE
-- ARGV: token, bytes of the prefix that is there, record, seconds it is kept, most bytes of a prefix
-- Returns: 'kept' | 'lost' (the lease) | 'other' (there are other bytes: write the whole) | 'full'
-- Atomic because a worker that lost its lease must not touch its successor's prefix (I3), and because a record that is
-- sent again after a lost reply must not be there twice: only the holder writes, so the length tells.
local g = redis.call('HMGET', KEYS[1], 'st', 'tok')
if g[1] ~= 'leased' or g[2] ~= ARGV[1] then return 'lost' end
local there, before = redis.call('STRLEN', KEYS[2]), tonumber(ARGV[2])
if there == before + #ARGV[3] then return 'kept' end
if there ~= before then return 'other' end
if before + #ARGV[3] > tonumber(ARGV[5]) then return 'full' end
redis.call('APPEND', KEYS[2], ARGV[3])
redis.call('EXPIRE', KEYS[2], ARGV[4])
return 'kept'
