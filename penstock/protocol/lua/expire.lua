-- expire: leased, queued or delayed -> retiring(dropped): a group that ran for too long, where a policy drops it
-- (leader). A worker that holds the job sees its lease lost.
-- KEYS: leader, group:JOB, inflight, delayed, bodies
-- ARGV: prefix, epoch, token, job
-- Returns: 1; 0 when it is none of these any more; -1: leadership lost
-- Atomic because the job leaves exactly one container (I1), and its place at the gate is free in that instant.
local prefix, job = ARGV[1], ARGV[4]
freeing(prefix)
if not leads(KEYS[1], ARGV[2], ARGV[3]) then return -1 end
local g = redis.call('HMGET', KEYS[2], 'st', 'cl', 'eid', 'ln', 'nb')
local st = g[1]
if st == 'leased' or st == 'queued' then
  take_entry(prefix, g[2], g[3])
elseif st == 'delayed' then
  redis.call('ZREM', KEYS[4], job)
  redis.call('HDEL', KEYS[5], job)
else
  return 0
end
redis.call('ZREM', KEYS[3], job)
redis.call('HSET', KEYS[2], 'st', 'retiring', 'r', 'expired')
redis.call('HDEL', KEYS[2], 'tok', 'own')
redis.call('SADD', prefix .. 'retiring', job)
leave_cohort(prefix, job, g[4], g[5])
count(prefix, 'dropped')
count(prefix, 'expired')
count(prefix, 'expired:' .. g[4])
if g[4] == 'train' then count(prefix, 'cancelled:train') end
if set_done(prefix, job) == 1 then count(prefix, 'duplicated') end
event(prefix, 'closed', job, g[4])
poke(prefix .. 'gate')
return 1
