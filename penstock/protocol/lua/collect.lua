-- collect: ready -> retiring(retired), for a scored group whose results were read (by the caller that asked for it) or
-- never collected (leader), and for a group of an evaluation that no consumer read (leader, once its result is written).
-- KEYS: group:JOB, ready, subs
-- ARGV: prefix, job, lane
-- Returns: 'retired' | '' (gone already) | the state it is in
--          | 'subscribed' (a subscription of its lane will retire it)
-- Atomic because the group leaves exactly one container (I1), and must not be taken from a subscription.
local group_key, ready_key, subs_key = KEYS[1], KEYS[2], KEYS[3]
local prefix, job, lane = ARGV[1], ARGV[2], ARGV[3]

freeing(prefix)
local g = redis.call('HMGET', group_key, 'st', 'ln')
if not g[1] or g[1] == 'retiring' then return '' end
if g[1] ~= 'ready' or g[2] ~= lane then return g[1] end
for _, name in ipairs(redis.call('HKEYS', subs_key)) do
  local sub = string.match(name, '^sub:(.*)$')
  if sub and covers(redis.call('HGET', prefix .. 'sub:' .. sub, 'lanes'), lane) then return 'subscribed' end
end
redis.call('ZREM', ready_key, job)
if lane == 'eval' then
  retire(prefix, job, 'retired', 'evaluated')
  count(prefix, 'unread_evaluations')
else
  retire(prefix, job, 'retired', 'collected')
end
count(prefix, 'retired')
count(prefix, 'gone:' .. lane)
if set_done(prefix, job) == 1 then count(prefix, 'duplicated') end
event(prefix, 'ended', job, lane)
return 'retired'
