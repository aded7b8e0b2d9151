-- cancel: any live -> retiring(cancelled) (operator). A worker that holds the job sees its lease lost.
-- A group in a batch that a trainer may still read stays: no cut batch is lost (I4).
-- KEYS: group:JOB, delayed, bodies, dead, ready, inflight, then sub:NAME of every live subscription
-- ARGV: prefix, job, then the subscriptions' names
-- Returns: the state it was in, 'cut' when it stays for the sake of a batch, or '' when there is nothing to cancel
-- Atomic because the job leaves exactly one container (I1).
local prefix, job = ARGV[1], ARGV[2]
freeing(prefix)
local g = redis.call('HMGET', KEYS[1], 'st', 'cl', 'eid', 'ln', 'nb')
local st = g[1]
if not st or st == 'retiring' then return '' end
for i = 7, #KEYS do
  local batch = tonumber(redis.call('HGET', KEYS[1], 'b:' .. ARGV[i - 4]) or 0)
  if batch > tonumber(redis.call('HGET', KEYS[i], 'ckpt') or 0) then return 'cut' end
end
if st == 'queued' or st == 'leased' then
  take_entry(prefix, g[2], g[3])
elseif st == 'delayed' then
  redis.call('ZREM', KEYS[2], job)
  redis.call('HDEL', KEYS[3], job)
elseif st == 'dead' then
  redis.call('XDEL', KEYS[4], g[3])
elseif st == 'ready' then
  redis.call('ZREM', KEYS[5], job)
  local told = {}
  for i = 7, #KEYS do -- places at the gate of those that had not used it, of a pool once
    local account = account_of(KEYS[i], ARGV[i - 4])
    local unused = not told[account] and redis.call('HEXISTS', KEYS[1], 'u:' .. account) == 0
    if unused and covers(redis.call('HGET', KEYS[i], 'lanes'), g[4]) then
      redis.call('HINCRBY', KEYS[i], 'disposed', 1)
      told[account] = true
    end
  end
  count(prefix, 'gone:' .. g[4])
end
redis.call('ZREM', KEYS[6], job)
redis.call('HSET', KEYS[1], 'st', 'retiring', 'r', 'cancelled')
redis.call('SADD', prefix .. 'retiring', job)
redis.call('HDEL', KEYS[1], 'tok', 'own')
if st ~= 'ready' and st ~= 'dead' then leave_cohort(prefix, job, g[4], g[5]) end
if st ~= 'ready' and st ~= 'dead' and g[4] == 'train' then count(prefix, 'cancelled:train') end
count(prefix, 'cancelled')
if set_done(prefix, job) == 1 then count(prefix, 'duplicated') end
event(prefix, 'closed', job, g[4])
poke(prefix .. 'gate')
return st
