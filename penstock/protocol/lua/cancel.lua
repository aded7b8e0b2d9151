-- cancel: any live -> retiring(cancelled) (operator). A worker that holds the job sees its lease lost.
-- A group in a batch that a trainer may still read stays: no cut batch is lost (I4).
-- KEYS: group:JOB, dead, ready, subs, then sub:NAME of every live subscription
-- ARGV: prefix, job, the only state in which it is cancelled ('' for any), codes of disposals (CODE=WORD, ...), then
-- the
--       subscriptions' names
-- Returns: the state it was in, 'cut' if it stays because of a batch, or '' if the job does not exist
-- Atomic because the job leaves exactly one container (I1).
local group_key, dead_key, ready_key, subs_key = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local first_sub_key = 5
local prefix, job, only, codes = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
local first_sub = 5

freeing(prefix)
local g = redis.call('HMGET', group_key, 'st', 'eid', 'ln', 'tk', 'lost')
local st, eid, lane = unpack(g)
if not st or st == 'retiring' or (only ~= '' and st ~= only) then return '' end
local subs = {}
for i = first_sub, #ARGV do subs[#subs + 1] = {key = KEYS[first_sub_key + #subs], name = ARGV[i]} end
for _, sub in ipairs(subs) do
  local batch = tonumber(redis.call('HGET', group_key, 'b:' .. sub.name) or 0)
  -- if it cannot be read, no checkpoint is known to be past the batch
  sub.ckpt, sub.batch = number_of(redis.call('HGET', sub.key, 'ckpt')) or 0, batch
  sub.uses = tonumber(redis.call('HGET', group_key, 'u:' .. account_of(sub.key, sub.name)) or 0)
  if batch > sub.ckpt then return 'cut' end
end
if withdraw(prefix, job, 'cancelled') then
  if lane == 'train' then count(prefix, 'cancelled:train') end
elseif st == 'dead' then
  redis.call('XDEL', dead_key, eid)
elseif st == 'ready' then
  redis.call('ZREM', ready_key, job)
  local told = {}
  for _, sub in ipairs(subs) do -- free the places at the gate of subscriptions that had not used it, of a pool once
    local account = account_of(sub.key, sub.name)
    local unused = not told[account] and redis.call('HEXISTS', group_key, 'u:' .. account) == 0
    if unused and covers(redis.call('HGET', sub.key, 'lanes'), lane) then
      -- a subscription that cannot be counted keeps its gate closed until it is dropped
      if number_of(redis.call('HGET', sub.key, 'disposed')) then redis.call('HINCRBY', sub.key, 'disposed', 1) end
      told[account] = true
    end
  end
  count(prefix, 'gone:' .. lane)
end
local left, reasons = left_subs(subs_key), reasons_in(codes)
local account, parts, checkpoints = fate_of(group_key, lane, g[4], g[5], subs, left, reasons, 'cancelled')
retire(prefix, job, 'cancelled', account, parts, nil, checkpoints)
count(prefix, 'cancelled')
if set_done(prefix, job) == 1 then count(prefix, 'duplicated') end
event(prefix, 'ended', job, lane)
poke(prefix .. 'gate')
return st
