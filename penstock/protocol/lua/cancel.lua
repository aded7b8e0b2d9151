-- cancel: any live -> retiring(cancelled) (operator). A worker that holds the job sees its lease lost.
-- A group in a batch that a trainer may still read stays: no cut batch is lost (I4).
-- KEYS: group:JOB, delayed, bodies, dead, ready, inflight, then sub:NAME of every live subscription
-- ARGV: prefix, job, then the subscriptions' names
-- Returns: the state it was in, 'cut' when it stays for the sake of a batch, or '' when there is nothing to cancel
-- Atomic because the job leaves exactly one container (I1).
local group_key, delayed_key, bodies_key = KEYS[1], KEYS[2], KEYS[3]
local dead_key, ready_key, inflight_key = KEYS[4], KEYS[5], KEYS[6]
local first_sub_key = 7
local prefix, job = ARGV[1], ARGV[2]
local first_sub = 3

freeing(prefix)
local g = redis.call('HMGET', group_key, 'st', 'cl', 'eid', 'ln', 'nb')
local st = g[1]
if not st or st == 'retiring' then return '' end
local subs = {}
for i = first_sub, #ARGV do subs[#subs + 1] = {key = KEYS[first_sub_key + #subs], name = ARGV[i]} end
for _, sub in ipairs(subs) do
  local batch = tonumber(redis.call('HGET', group_key, 'b:' .. sub.name) or 0)
  if batch > tonumber(redis.call('HGET', sub.key, 'ckpt') or 0) then return 'cut' end
end
if st == 'queued' or st == 'leased' then
  take_entry(prefix, g[2], g[3])
elseif st == 'delayed' then
  redis.call('ZREM', delayed_key, job)
  redis.call('HDEL', bodies_key, job)
elseif st == 'dead' then
  redis.call('XDEL', dead_key, g[3])
elseif st == 'ready' then
  redis.call('ZREM', ready_key, job)
  local told = {}
  for _, sub in ipairs(subs) do -- places at the gate of those that had not used it, of a pool once
    local account = account_of(sub.key, sub.name)
    local unused = not told[account] and redis.call('HEXISTS', group_key, 'u:' .. account) == 0
    if unused and covers(redis.call('HGET', sub.key, 'lanes'), g[4]) then
      redis.call('HINCRBY', sub.key, 'disposed', 1)
      told[account] = true
    end
  end
  count(prefix, 'gone:' .. g[4])
end
redis.call('ZREM', inflight_key, job)
redis.call('HSET', group_key, 'st', 'retiring', 'r', 'cancelled')
redis.call('SADD', prefix .. 'retiring', job)
redis.call('HDEL', group_key, 'tok', 'own')
if st ~= 'ready' and st ~= 'dead' then leave_cohort(prefix, job, g[4], g[5]) end
if st ~= 'ready' and st ~= 'dead' and g[4] == 'train' then count(prefix, 'cancelled:train') end
count(prefix, 'cancelled')
if set_done(prefix, job) == 1 then count(prefix, 'duplicated') end
event(prefix, 'ended', job, g[4])
poke(prefix .. 'gate')
return st
