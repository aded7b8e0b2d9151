-- drop: leased, queued or delayed -> retiring(dropped): a group that timed out, where a policy drops it (leader). A
-- worker that holds the job sees its lease lost.
-- KEYS: leader, group:JOB, inflight, delayed, bodies
-- ARGV: prefix, epoch, token, job
-- Returns: 1; 0 when it is none of these any more; -1: leadership lost
-- Atomic because the job leaves exactly one container (I1), and its place at the gate is free in that instant.
local leader_key, group_key, inflight_key = KEYS[1], KEYS[2], KEYS[3]
local delayed_key, bodies_key = KEYS[4], KEYS[5]
local prefix, epoch, token, job = ARGV[1], ARGV[2], ARGV[3], ARGV[4]

freeing(prefix)
if not leads(leader_key, epoch, token) then return -1 end
local g = redis.call('HMGET', group_key, 'st', 'cl', 'eid', 'ln', 'nb')
local st = g[1]
if st == 'leased' or st == 'queued' then
  take_entry(prefix, g[2], g[3])
elseif st == 'delayed' then
  redis.call('ZREM', delayed_key, job)
  redis.call('HDEL', bodies_key, job)
else
  return 0
end
redis.call('ZREM', inflight_key, job)
redis.call('HSET', group_key, 'st', 'retiring', 'r', 'timed_out')
redis.call('HDEL', group_key, 'tok', 'own')
redis.call('SADD', prefix .. 'retiring', job)
leave_cohort(prefix, job, g[4], g[5])
count(prefix, 'dropped')
count(prefix, 'timed_out')
count(prefix, 'timed_out:' .. g[4])
if g[4] == 'train' then count(prefix, 'cancelled:train') end
if set_done(prefix, job) == 1 then count(prefix, 'duplicated') end
event(prefix, 'ended', job, g[4])
poke(prefix .. 'gate')
return 1
