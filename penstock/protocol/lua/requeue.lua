-- requeue: dead -> queued, with its attempts reset (operator).
-- KEYS: group:JOB, dead, clock
-- ARGV: prefix, job, version field of clock
-- Returns: 1, or 0 when the job is not dead
-- Atomic because two operators must not queue it twice.
local group_key, dead_key, clock_key = KEYS[1], KEYS[2], KEYS[3]
local prefix, job, clock_field = ARGV[1], ARGV[2], ARGV[3]

local g = redis.call('HMGET', group_key, 'st', 'eid', 'ln', 'c', 'co', 'pf', 'v0')
if g[1] ~= 'dead' then return 0 end
local found = redis.call('XRANGE', dead_key, g[2], g[2])
if #found == 0 then return 0 end
redis.call('XDEL', dead_key, g[2])
book(prefix, g[3], 'buried', -held_by(group_key))
local nb = redis.call('HGET', clock_key, clock_field) or '0'
-- a new place in the order of admission: its old cohort was trained without it
local seq = count(prefix, 'seq:' .. g[3])
redis.call('HSET', group_key, 'nb', nb, 'seq', seq)
if g[5] then redis.call('ZADD', prefix .. 'unfinished:' .. g[3], seq, job) end
redis.call('HDEL', group_key, 'att', 'cr', 'wd', 't0')
if g[3] == 'train' then redis.call('HINCRBY', prefix .. 'cohorts', nb, 1) end
local begun = tonumber(g[4] or 0) > 0 or g[6]
if begun and g[3] == 'train' then redis.call('ZADD', prefix .. 'inflight', g[7], job) end
put_entry(prefix, begun and 'resume' or g[3], job, nb, field(found[1][2], 'body'))
count(prefix, 'requeued')
return 1
