-- seal: ready -> retiring(retired | dropped | evicted) (leader).
-- KEYS: leader, subs, ready, then sub:NAME of every live subscription
-- ARGV: prefix, epoch, token, revision of subs, number of subscriptions,
--       those that may lose batches not covered by a checkpoint (0|1 each, in one word), codes of disposals
--       (CODE=WORD, ...), then their names, then jobs
-- Returns: list of jobs sealed (none if a subscription cannot be read), 'subs', or -1 when the leadership is lost
-- Atomic because a subscription that joins, or a rewind, must not race with retirement: every use must be final
-- and every batch that holds the group must be below its subscription's checkpoint. A group of a lane without a
-- subscription waits for one.
local leader_key, subs_key, ready_key = KEYS[1], KEYS[2], KEYS[3]
local first_sub_key = 4
local prefix, epoch, token = ARGV[1], ARGV[2], ARGV[3]
local revision, num_subs, evict_flags, codes = ARGV[4], tonumber(ARGV[5]), ARGV[6], ARGV[7]
local first_sub = 8

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
local sealed, left, reasons = {}, left_subs(subs_key), reasons_in(codes)

local function seal_one(job)
  local key = group_key_of(prefix, job)
  local g = redis.call('HMGET', key, 'st', 'ln', 'tk', 'lost')
  local final, used, readers = g[1] == 'ready', false, {}
  for _, s in ipairs(subs) do
    s.batch = 0
    if final and covers(s.lanes, g[2]) then
      readers[#readers + 1] = s
      local u = redis.call('HMGET', key, s.used, 'b:' .. s.name)
      s.uses, s.batch = tonumber(u[1] or 0), tonumber(u[2] or 0)
      if s.uses > 0 or s.batch > 0 then used = true end
      if s.uses >= 0 and s.uses < s.reuse then final = false end
      if s.batch > s.ckpt and not (s.evict and s.batch <= s.cursor) then final = false end
    end
  end
  if not final or #readers == 0 then return end
  redis.call('ZREM', ready_key, job)
  local account, parts, checkpoints = fate_of(key, g[2], g[3], g[4], readers, left, reasons, 'dropped:unwanted')
  local reason = account == 'evicted' and account or (used and 'retired' or 'dropped')
  retire(prefix, job, reason, account, parts, total(tokens_in(g[3])), checkpoints)
  count(prefix, reason)
  count(prefix, 'gone:' .. g[2])
  if set_done(prefix, job) == 1 then count(prefix, 'duplicated') end
  for _, s in ipairs(subs) do s.floor = math.max(s.floor, s.batch) end
  sealed[#sealed + 1] = job
end

book_together(prefix, function()
  for i = first_sub + num_subs, #ARGV do seal_one(ARGV[i]) end
end)
for _, s in ipairs(subs) do
  if s.floor > tonumber(redis.call('HGET', s.key, 'floor') or 0) then redis.call('HSET', s.key, 'floor', s.floor) end
end
return sealed
