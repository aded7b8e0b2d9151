-- seal: ready -> retiring(retired | dropped | evicted) (leader).
-- KEYS: leader, subs, ready, then sub:NAME of every live subscription
-- ARGV: prefix, epoch, token, revision of subs, number of subscriptions,
--       those that may lose what they have no checkpoint past (0|1 each, in one word), then their names, then jobs
-- Returns: list of jobs sealed (none where a subscription cannot be read), 'subs', or -1 when the leadership is lost
-- Atomic because a subscription that joins, or a rewind, must not race with retirement: every use must be final
-- and every batch that holds the group must lie below its subscription's checkpoint. A group of a lane that nobody
-- subscribed to waits for somebody who does.
local leader_key, subs_key, ready_key = KEYS[1], KEYS[2], KEYS[3]
local first_sub_key = 4
local prefix, epoch, token = ARGV[1], ARGV[2], ARGV[3]
local revision, num_subs, evict_flags = ARGV[4], tonumber(ARGV[5]), ARGV[6]
local first_sub = 7

freeing(prefix)
if not leads(leader_key, epoch, token) then return -1 end
if (redis.call('HGET', subs_key, 'rev') or '0') ~= revision then return 'subs' end
local subs = {}
for i = 1, num_subs do
  local sub_key, sub = KEYS[first_sub_key + i - 1], ARGV[first_sub + i - 1]
  local s = redis.call('HMGET', sub_key, 'lanes', 'reuse', 'share')
  local reuse, at = number_of((s[2] or '') ~= '' and s[2] or '1'), numbers_of(sub_key, 'ckpt', 'cursor', 'floor')
  if not reuse or not at then return {} end
  subs[i] = {name = sub, key = sub_key, lanes = s[1] or '', reuse = reuse, ckpt = at[1], cursor = at[2], floor = 0,
    evict = string.sub(evict_flags, i, i) == '1',
    used = 'u:' .. ((s[3] or '') ~= '' and 'share:' .. s[3] or sub)}
end
local sealed = {}
for i = first_sub + num_subs, #ARGV do
  local job = ARGV[i]
  local key = group_key_of(prefix, job)
  local g = redis.call('HMGET', key, 'st', 'ln')
  local final, covered, used, early = g[1] == 'ready', false, false, false
  for _, s in ipairs(subs) do
    if final and covers(s.lanes, g[2]) then
      covered = true
      local u = redis.call('HMGET', key, s.used, 'b:' .. s.name)
      local uses, batch = tonumber(u[1] or 0), tonumber(u[2] or 0)
      if uses > 0 or batch > 0 then used = true end
      if uses >= 0 and uses < s.reuse then final = false end
      if batch > s.ckpt then
        if s.evict and batch <= s.cursor then early = true else final = false end
      end
      s.batch = batch
    else
      s.batch = 0
    end
  end
  if final and covered then
    local reason = early and 'evicted' or (used and 'retired' or 'dropped')
    redis.call('ZREM', ready_key, job)
    retire(prefix, job, reason)
    count(prefix, reason)
    count(prefix, 'gone:' .. g[2])
    if set_done(prefix, job) == 1 then count(prefix, 'duplicated') end
    for _, s in ipairs(subs) do s.floor = math.max(s.floor, s.batch) end
    sealed[#sealed + 1] = job
  end
end
for _, s in ipairs(subs) do
  if s.floor > tonumber(redis.call('HGET', s.key, 'floor') or 0) then redis.call('HSET', s.key, 'floor', s.floor) end
end
return sealed
