-- A complete group: its payloads, whether subscriptions use it, and its retirement.
-- Keys: ready, retiring, payload:SAMPLE:TOKEN (on payload servers), fields kept, u:SUB, fr:SUB, x:K and r of group:JOB

-- Return whether `lane` is one of a subscription's lanes (a comma-separated list).
local function covers(lanes, lane)
  return string.find(',' .. (lanes or '') .. ',', ',' .. lane .. ',', 1, true) ~= nil
end

-- Record that the payload of a committed sample is lost; it is counted once, however many find it.
local function lose(prefix, job, k)
  local key = group_key_of(prefix, job)
  if redis.call('EXISTS', key) == 1 and redis.call('HSETNX', key, 'x:' .. k, 1) == 1 then
    redis.call('HSET', key, 'lost', 1)
    count(prefix, 'payload_lost')
    return 1
  end
  return 0
end

-- Retire a group for `reason`: it will be swept, in a run that keeps a history once it is recorded. Nothing waits for
-- the recorder: groups beyond the backlog go unrecorded, and are counted. Its tokens go to `account`, except `parts` of
-- them (`spend`).
local function retire(prefix, job, reason, account, parts, held, checkpoints)
  local key = group_key_of(prefix, job)
  spend(prefix, key, account, parts, held)
  -- the account, which the rows of its history repeat
  redis.call('HSET', key, 'st', 'retiring', 'r', reason, 'ac', account, 'cp', checkpoints or '')
  local backlog = redis.call('HGET', prefix .. 'history', 'backlog')
  if backlog and redis.call('ZCARD', prefix .. 'unrecorded') < (number_of(backlog) or 0) then
    redis.call('ZADD', prefix .. 'unrecorded', now_ms(), job)
    return
  end
  redis.call('SADD', prefix .. 'retiring', job)
  if backlog then count(prefix, 'unrecorded') end
end

-- persist: written -> kept, on a payload server (leader; at ingest and again at its start).
-- KEYS: each committed sample's payload:SAMPLE:TOKEN
-- ARGV: none
-- Returns: per key 1 when it is permanent now, 0 when it is gone
-- Atomic only because it is one round trip; repeating it changes nothing.
local function persist()
  local kept = {}
  for i, key in ipairs(KEYS) do
    local done = redis.call('PERSIST', key)
    if done == 0 then done = redis.call('EXISTS', key) end
    kept[i] = done
  end
  return kept
end

-- keep: the payloads of ready groups are permanent now; a group may be cut once all of its samples are kept. The share
-- of its right answers is recorded for its prompt.
-- KEYS: leader
-- ARGV: prefix, epoch, token, then per group: job, samples kept or lost for good, k of those lost (with commas), its
--       share (1: no answer is right, ... 255: all are; 0: its group is not counted)
-- Returns: number of groups that were still ready, or -1 when the leadership is lost
-- Atomic because only the leader may report this (LEAD), and because a group counts once: a mark is written with the
-- count, so another leader, or a repeated call, does not count it again.
local function keep()
  local leader_key = KEYS[1]
  local prefix, epoch, token = ARGV[1], ARGV[2], ARGV[3]
  local first_group = 4

  local kept = 0
  freeing(prefix)
  if not leads(leader_key, epoch, token) then return -1 end

  -- Insert the share of one more group before the prompt's earlier ones; the oldest is removed.
  local function count_share(key, job, share)
    local rates, at = rate_place_of(prefix, job)
    if not rates or redis.call('HSETNX', key, 'ps', share) == 0 then return end
    local known = redis.call('GETRANGE', rates, at, at + RATE_GROUPS - 2)
    redis.call('SETRANGE', rates, at, string.char(share) .. known)
  end

  for i = first_group, #ARGV, 4 do
    local job, num_kept, lost, share = ARGV[i], ARGV[i + 1], ARGV[i + 2], tonumber(ARGV[i + 3])
    local key = group_key_of(prefix, job)
    if redis.call('HGET', key, 'st') == 'ready' then
      redis.call('HSET', key, 'kept', num_kept)
      for k in string.gmatch(lost, '%d+') do lose(prefix, job, k) end
      if share > 0 then count_share(key, job, share) end
      kept = kept + 1
    end
  end
  return kept
end

-- lost: the payload of a cut sample is gone (trainer that tried to read it).
-- KEYS: counters (unused; it names the hash slot)
-- ARGV: prefix, then per sample: job, k, token that committed it
-- Returns: those that were not reported before, by their place in ARGV (from 0)
-- Atomic because every rank and every delivery may report it, and it counts once. If a rollback of Redis undid a
-- commit, the sample is generated again, and committed under another token: the payload of that one is not gone.
local function lost()
  local prefix = ARGV[1]
  local first_sample = 2

  freeing(prefix)
  local new = {}
  for i = first_sample, #ARGV, 3 do
    local job, k, token = ARGV[i], ARGV[i + 1], ARGV[i + 2]
    local is_there = redis.call('HGET', group_key_of(prefix, job), 's:' .. k) == token
    if is_there and lose(prefix, job, k) == 1 then new[#new + 1] = (i - first_sample) / 3 end
  end
  return new
end

-- ready_groups: count the groups of each lane that a batch may still take.
-- KEYS: ready, subs
-- ARGV: prefix
-- Returns: {lane, count, ...}; a group of a lane without a subscription counts until it is collected. Reads
--          only; invalid entries are skipped
-- Atomic because groups are cut meanwhile: a group is ready for `penstock status` as long as it is for the cut.
local function ready_groups()
  local ready_key, subs_key = KEYS[1], KEYS[2]
  local prefix = ARGV[1]

  local readers = {} -- lane -> subscriptions that take its groups
  for _, name in ipairs(redis.call('HKEYS', subs_key)) do
    if string.sub(name, 1, 4) == 'sub:' then
      local s = redis.pcall('HMGET', prefix .. name, 'lanes', 'reuse', 'share')
      if not s.err and s[1] then
        local share = s[3] and s[3] ~= '' and 'share:' .. s[3]
        local reader = {used = 'u:' .. (share or string.sub(name, 5)), reuse = tonumber(s[2] or 1) or 1}
        for lane in string.gmatch(s[1], '[^,]+') do
          readers[lane] = readers[lane] or {}
          table.insert(readers[lane], reader)
        end
      end
    end
  end

  local function is_open(key, lane)
    if not readers[lane] then return true end
    for _, reader in ipairs(readers[lane]) do
      local uses = tonumber(redis.call('HGET', key, reader.used) or 0) or 0
      if uses >= 0 and uses < reader.reuse then return true end
    end
    return false
  end

  local counts, answer = {}, {}
  for _, job in ipairs(redis.call('ZRANGE', ready_key, 0, -1)) do
    local key = group_key_of(prefix, job)
    local lane = redis.pcall('HGET', key, 'ln')
    if type(lane) == 'string' and is_open(key, lane) then counts[lane] = (counts[lane] or 0) + 1 end
  end
  for lane, groups in pairs(counts) do
    answer[#answer + 1], answer[#answer + 2] = lane, groups
  end
  return answer
end

-- judge: results of a subscription's filters for ready groups: rejected, or kept although a filter raised (leader).
-- KEYS: leader, sub:NAME
-- ARGV: prefix, epoch, token, sub, code of a filtered group (negative), then per group: job, reason,
--       keep it (0|1), a filter raised (0|1), samples, sum of their rewards
-- Returns: number of groups dropped (0 if the subscription was dropped meanwhile), or -1 when the leadership is
--          lost
-- Atomic because a drop frees its place at the gate exactly once, and the ledger agrees with the places freed.
local function judge()
  local leader_key, sub_key = KEYS[1], KEYS[2]
  local prefix, epoch, token, sub, code = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5]
  local first_group = 6

  -- The sum is limited on both sides of 0 (MOST_REWARD in position.py): beyond float64 Python cannot read it,
  -- and at infinity Redis raises.
  local MOST_REWARD = 1e300

  local function add_reward(reward)
    local known = tonumber(redis.call('HGET', sub_key, 'rejected_reward') or 0)
    if not known then return end
    local sum = known + tonumber(reward)
    if math.abs(sum) <= MOST_REWARD then
      redis.call('HINCRBYFLOAT', sub_key, 'rejected_reward', reward)
    elseif sum == sum then
      redis.call('HSET', sub_key, 'rejected_reward', string.format('%.0f', sum > 0 and MOST_REWARD or -MOST_REWARD))
    end
  end

  local dropped = 0
  local used = 'u:' .. account_of(sub_key, sub)
  freeing(prefix)
  if not leads(leader_key, epoch, token) then return -1 end
  if redis.call('EXISTS', sub_key) == 0 then return 0 end
  for i = first_group, #ARGV, 6 do
    local key, reason, kept = group_key_of(prefix, ARGV[i]), ARGV[i + 1], ARGV[i + 2]
    local raised, samples, reward = ARGV[i + 3], ARGV[i + 4], ARGV[i + 5]
    if redis.call('HGET', key, 'st') == 'ready' then
      if raised == '1' and redis.call('HSETNX', key, 'f:' .. sub, 'raised') == 1 then
        redis.call('HINCRBY', sub_key, 'filter_raised', 1)
      end
      if kept == '0' and redis.call('HSETNX', key, used, code) == 1 then
        redis.call('HINCRBY', sub_key, 'drop:filter/' .. reason, 1)
        redis.call('HSET', key, 'fr:' .. sub, reason)
        redis.call('HINCRBY', sub_key, 'rejected_samples', samples)
        add_reward(reward)
        dropped = dropped + 1
      end
    end
  end
  if dropped > 0 then
    redis.call('HINCRBY', sub_key, 'disposed', dropped)
    poke(prefix .. 'gate')
  end
  return dropped
end

-- dispose: a subscription (or its pool) will not use these ready groups: stale, filtered, rewound (leader).
-- KEYS: leader, sub:NAME
-- ARGV: prefix, epoch, token, sub, reason, code (negative), then for each group
--       job, samples and generated tokens that count as stale (0, 0: for another reason), staleness
-- Returns: number disposed of (0 if the subscription was dropped meanwhile), or -1 when the leadership is lost
-- Atomic because the place at the gate is freed exactly once (u goes from unused to the code). A group that was used
-- and has uses left loses them; its place was consumed by its first use.
local function dispose()
  local leader_key, sub_key = KEYS[1], KEYS[2]
  local prefix, epoch, token, sub, reason, code = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5], ARGV[6]
  local first_group = 7

  local disposed, freed, samples, tokens, staleness = 0, 0, 0, 0, 0
  freeing(prefix)
  if not leads(leader_key, epoch, token) then return -1 end
  if redis.call('EXISTS', sub_key) == 0 then return 0 end
  local used = 'u:' .. account_of(sub_key, sub)
  for i = first_group, #ARGV, 4 do
    local key, aged_samples, aged_tokens = group_key_of(prefix, ARGV[i]), ARGV[i + 1], ARGV[i + 2]
    local g = redis.call('HMGET', key, 'st', used)
    if g[1] == 'ready' and tonumber(g[2] or 0) >= 0 then
      if not g[2] then freed = freed + 1 end
      redis.call('HSET', key, used, code)
      disposed = disposed + 1
      samples, tokens = samples + tonumber(aged_samples), tokens + tonumber(aged_tokens)
      staleness = staleness + tonumber(ARGV[i + 3])
    end
  end
  if disposed > 0 then
    redis.call('HINCRBY', sub_key, 'disposed', freed)
    redis.call('HINCRBY', sub_key, 'drop:' .. reason, disposed)
    redis.call('HINCRBY', sub_key, 'staleness:' .. reason, staleness)
    if samples > 0 then
      redis.call('HINCRBY', sub_key, 'aged_samples', samples)
      redis.call('HINCRBY', sub_key, 'aged_tokens', tokens)
    end
    poke(prefix .. 'gate')
  end
  return disposed
end

-- seal: ready -> retiring(retired | dropped | evicted) (leader).
-- KEYS: leader, subs, ready, then sub:NAME of every live subscription
-- ARGV: prefix, epoch, token, revision of subs, number of subscriptions,
--       those that may lose batches not covered by a checkpoint (0|1 each, in one word), codes of disposals
--       (CODE=WORD, ...), then their names, then jobs
-- Returns: list of jobs sealed (none if a subscription cannot be read), 'subs', or -1 when the leadership is lost
-- Atomic because a subscription that joins, or a rewind, must not race with retirement: every use must be final
-- and every batch that holds the group must be below its subscription's checkpoint. A group of a lane without a
-- subscription waits for one.
local function seal()
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
end

-- collect: ready -> retiring(retired), for a scored group whose results were read (by the caller that asked for it) or
-- never collected (leader), and for a group of an evaluation that no consumer read (leader, once its result is
-- written).
-- KEYS: group:JOB, ready, subs
-- ARGV: prefix, job, lane
-- Returns: 'retired' | '' (gone already) | the state it is in
--          | 'subscribed' (a subscription of its lane will retire it)
-- Atomic because the group leaves exactly one container (I1), and must not be taken from a subscription.
local function collect()
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
end

-- sweep: retiring -> gone; its payloads are unlinked already (leader). Groups that wait for the recorder stay.
-- KEYS: leader
-- ARGV: prefix, epoch, token, then per group: job, n
-- Returns: number of groups gone, or -1 when the leadership is lost
-- Atomic because a group must not be deleted in part.
local function sweep()
  local leader_key = KEYS[1]
  local prefix, epoch, token = ARGV[1], ARGV[2], ARGV[3]
  local first_group = 4

  freeing(prefix)
  if not leads(leader_key, epoch, token) then return -1 end
  local gone = 0
  for i = first_group, #ARGV, 2 do
    local job, n = ARGV[i], tonumber(ARGV[i + 1])
    local key = group_key_of(prefix, job)
    local waits = redis.call('ZSCORE', prefix .. 'unrecorded', job)
    if redis.call('HGET', key, 'st') == 'retiring' and not waits then
      for k = 0, n - 1 do redis.call('DEL', prefix .. 'partial:' .. job .. '/' .. k) end
      redis.call('DEL', key, prefix .. 'meta:' .. job)
      redis.call('SREM', prefix .. 'retiring', job)
      gone = gone + 1
    end
  end
  if gone > 0 then count(prefix, 'swept', gone) end
  return gone
end
