-- A sample of a leased job: the prefix that another worker may continue, its commit, and the reward of its group.
-- Keys: meta:JOB, partial:SAMPLE, fields s:K, c and rw of group:JOB

-- Complete a group: its lease ends, and subscriptions may use it. The caller has checked that it is leased, in this
-- lane and entry.
local function complete(prefix, job, lane, eid)
  local key = group_key_of(prefix, job)
  local g = redis.call('HMGET', key, 'ln', 'nb')
  redis.call('HSET', key, 'st', 'ready', 't1', now_ms())
  redis.call('HDEL', key, 'tok', 'own', 'pf', 'told')
  redis.call('XACK', lane_key_of(prefix, lane), GROUP, eid)
  redis.call('XDEL', lane_key_of(prefix, lane), eid)
  redis.call('ZREM', prefix .. 'inflight', job)
  redis.call('ZADD', prefix .. 'ready', count(prefix, 'completed'), job)
  leave_cohort(prefix, job, g[1], g[2])
  event(prefix, 'ready', job, g[1])
end

-- checkpoint: keep a running sample's prefix, so that another worker can continue it (worker).
-- KEYS: group:JOB, partial:SAMPLE
-- ARGV: prefix, token, k, record, seconds it is kept, report of tokens (`LIVE,BEHIND_STOP,REWOUND,LOST_TURN,UNHEARD`;
--       '': none)
-- Returns: 1, or 0 when the lease is lost
-- Atomic because a worker that lost its lease must not overwrite its successor's prefix (I3).
local function checkpoint()
  local group_key, partial_key = KEYS[1], KEYS[2]
  local prefix, token, k, record, ttl_s, told = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5], ARGV[6]

  local g = redis.call('HMGET', group_key, 'st', 'tok', 'ln')
  if g[1] ~= 'leased' or g[2] ~= token then return 0 end
  redis.call('SET', partial_key, record, 'EX', ttl_s)
  redis.call('HSET', group_key, 'pf', '1')
  tell(prefix, group_key, g[3], k, told, true)
  return 1
end

-- extend: append tokens to a running sample's prefix (worker).
-- KEYS: group:JOB, partial:SAMPLE
-- ARGV: prefix, token, k, bytes of the stored prefix, record, seconds it is kept, most bytes of a prefix,
--       report of tokens (`LIVE,BEHIND_STOP,REWOUND,LOST_TURN,UNHEARD`; '': none)
-- Returns: 'kept' | 'lost' (the lease) | 'other' (other bytes are stored: write the complete prefix) | 'full'
-- Atomic because a worker that lost its lease must not touch its successor's prefix (I3), and because a record that is
-- sent again after a lost reply must not be appended twice: only the holder writes, so the length decides.
local function extend()
  local group_key, partial_key = KEYS[1], KEYS[2]
  local prefix, token, k, before, record = ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[4]), ARGV[5]
  local ttl_s, max_bytes, told = ARGV[6], tonumber(ARGV[7]), ARGV[8]

  local g = redis.call('HMGET', group_key, 'st', 'tok', 'ln')
  if g[1] ~= 'leased' or g[2] ~= token then return 'lost' end
  local there = redis.call('STRLEN', partial_key)
  if there == before + #record then return 'kept' end
  if there ~= before then return 'other' end
  if before + #record > max_bytes then return 'full' end
  redis.call('APPEND', partial_key, record)
  redis.call('EXPIRE', partial_key, ttl_s)
  tell(prefix, group_key, g[3], k, told, true)
  return 'kept'
end

-- unread: prefixes that cannot be continued are dropped; their samples start over (worker).
-- KEYS: group:JOB
-- ARGV: prefix, job, token, then k of each
-- Returns: 1, or 0 when the lease is lost
-- Atomic because a prefix and its tokens in the ledger change together, and because a worker that lost its lease must
-- not drop its successor's (I3).
local function unread()
  local group_key = KEYS[1]
  local prefix, job, token = ARGV[1], ARGV[2], ARGV[3]
  local first_sample = 4

  freeing(prefix)
  local g = redis.call('HMGET', group_key, 'st', 'tok', 'ln')
  if g[1] ~= 'leased' or g[2] ~= token then return 0 end
  for i = first_sample, #ARGV do
    local name = 't:' .. ARGV[i]
    redis.call('DEL', prefix .. 'partial:' .. job .. '/' .. ARGV[i])
    book(prefix, g[3], 'unreadable_prefix', numbers_in(redis.call('HGET', group_key, name))[1])
    redis.call('HDEL', group_key, name)
  end
  return 1
end

-- commit: written -> committed, and leased -> ready with the last k (worker). Several samples of one job at once.
-- If a group reward is still to come, the last k leaves the job leased, and the verb `reward` completes it.
-- KEYS: group:JOB, meta:JOB
-- ARGV: prefix, job, token, a group reward is still to come (0|1), then per sample: k, oldest version (-1: none),
--       metadata record, report of tokens (`LIVE,BEHIND_STOP,REWOUND,LOST_TURN,UNHEARD`)
-- Returns: {'ok' | 'ready' | 'reward' (all are committed, the group's reward is still to come) | 'lost',
--           new commits, already committed by this token, committed by another lease}
-- Atomic because a sample must be committed at most once, however late and however often (I2), and only by the
-- holder of the lease (I3). Repeating it with the same token changes nothing.
-- Samples are read and written together: a Redis call from a script costs as much as the work it does here.
local function commit()
  local group_key, meta_key = KEYS[1], KEYS[2]
  local prefix, job, token, with_reward = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
  local first_sample = 5

  local slots, words = {}, {}
  for i = first_sample, #ARGV, 4 do
    slots[#slots + 1] = 's:' .. ARGV[i]
    words[#words + 1] = 't:' .. ARGV[i]
  end
  local before = redis.call('HMGET', group_key, unpack(slots))
  local g = redis.call('HMGET', group_key, 'st', 'tok', 'n', 'o', 'ln', 'nb', 'cl', 'eid', 'tk', 'told', 'rw')
  local new, again, taken = 0, 0, 0
  if g[1] ~= 'leased' or g[2] ~= token then
    for _, held in ipairs(before) do
      if held == token then again = again + 1 end
    end
    if again == #slots then return {g[1] == 'ready' and 'ready' or 'ok', 0, again, 0} end
    count(prefix, 'refused')
    return {'lost', 0, again, 0}
  end
  require_lane(prefix, g[7])
  local oldest = tonumber(g[4] or -1)
  local seen, fields, records, partials, drawn, heard = {}, {}, {}, {}, {g[9] or nil}, 0
  local told = g[10] and redis.call('HMGET', group_key, unpack(words)) or {}
  for i, held in ipairs(before) do
    local at = first_sample + 4 * (i - 1)
    local k, o, record, word = ARGV[at], tonumber(ARGV[at + 1]), ARGV[at + 2], ARGV[at + 3]
    if held == token or seen[slots[i]] then
      again = again + 1
    elseif held then
      taken = taken + 1
    else
      seen[slots[i]] = true
      fields[#fields + 1] = slots[i]
      fields[#fields + 1] = token
      records[#records + 1] = record
      partials[#partials + 1] = prefix .. 'partial:' .. job .. '/' .. k
      local more, now = compare_reports(prefix, g[5], told[i], word)
      heard = heard + more
      if now[1] > 0 then drawn[#drawn + 1] = k .. ':' .. now[1] end
      if o >= 0 and (oldest < 0 or o < oldest) then oldest = o end
      new = new + 1
    end
  end
  if new > 0 then
    redis.call('HSET', group_key, 'o', oldest, 'tk', table.concat(drawn, ','), unpack(fields))
    if g[10] then redis.call('HDEL', group_key, unpack(words)) end
    if with_reward == '1' then redis.call('HSET', group_key, 'rw', 1) end
    book(prefix, g[5], 'heard', heard)
    redis.call('APPEND', meta_key, table.concat(records))
    redis.call('DEL', unpack(partials))
    count(prefix, 'committed', new)
  end
  if taken > 0 then count(prefix, 'refused', taken) end
  local committed = redis.call('HINCRBY', group_key, 'c', new)
  if committed < tonumber(g[3]) then return {'ok', new, again, taken} end
  if with_reward == '1' or g[11] then return {'reward', new, again, taken} end
  complete(prefix, job, g[7], g[8])
  return {'ready', new, again, taken}
end

-- reward: leased -> ready for a group all of whose samples are committed: its group reward (worker).
-- KEYS: group:JOB, meta:JOB
-- ARGV: prefix, job, token, records of all its samples with their rewards
-- Returns: 'ready' | 'lost' (the lease is another's) | 'missing' (a sample is not committed, or no group reward is due)
-- Atomic because rewards must be written once, by the holder of the lease (I3), in the instant in which the group may
-- be used; a complete group gets no more commits, so its records are those that the holder has read. Repeating it with
-- the same token changes nothing.
local function reward()
  local group_key, meta_key = KEYS[1], KEYS[2]
  local prefix, job, token, records = ARGV[1], ARGV[2], ARGV[3], ARGV[4]

  freeing(prefix) -- it leads to a cut, and that to retirement
  local g = redis.call('HMGET', group_key, 'st', 'tok', 'n', 'c', 'cl', 'eid', 'rw')
  if g[1] ~= 'leased' or g[2] ~= token then
    if g[7] == token then return 'ready' end
    count(prefix, 'refused')
    return 'lost'
  end
  if g[7] ~= '1' or g[4] ~= g[3] then return 'missing' end
  require_lane(prefix, g[5])
  redis.call('SET', meta_key, records)
  redis.call('HSET', group_key, 'rw', token)
  complete(prefix, job, g[5], g[6])
  count(prefix, 'group_rewards')
  return 'ready'
end
