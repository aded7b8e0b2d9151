-- drop: leased, queued or delayed -> retiring(dropped): a group that timed out, if a policy drops it (leader). A
-- worker that holds the job loses its lease.
-- KEYS: leader, group:JOB
-- ARGV: prefix, epoch, token, job
-- Returns: 1; 0 when it is in none of these states any more; -1: leadership lost
-- Atomic because the job leaves exactly one container (I1), and its place at the gate is free in that instant.
local leader_key, group_key = KEYS[1], KEYS[2]
local prefix, epoch, token, job = ARGV[1], ARGV[2], ARGV[3], ARGV[4]

freeing(prefix)
if not leads(leader_key, epoch, token) then return -1 end
local lane = withdraw(prefix, job, 'timed_out')
if not lane then return 0 end
retire(prefix, job, 'timed_out', 'dropped:timed_out')
count(prefix, 'dropped')
count(prefix, 'timed_out')
count(prefix, 'timed_out:' .. lane)
if lane == 'train' then count(prefix, 'cancelled:train') end
if set_done(prefix, job) == 1 then count(prefix, 'duplicated') end
event(prefix, 'ended', job, lane)
poke(prefix .. 'gate')
return 1
