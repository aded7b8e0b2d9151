-- Distribution of weights without a shared disk: a transfer sends a version to the workers that enrolled for it; a
-- relay passes the ranges of an object (a file of weights) from the trainer to the workers and between workers.
-- Keys: transfer:MODEL, transfers:MODEL, relay:OBJECT, relay_names, relay_peers:OBJECT, relay_have:OBJECT:WORKER,
--       relay_slot:OBJECT:1, relay_slot:OBJECT:2, relay_taken:OBJECT

-- transfer_open: workers that are ready may enroll for a version that is sent without the disk (the trainer's driver).
-- KEYS: transfer:MODEL, sub:NAME
-- ARGV: prefix, owner, gen, id (VERSION-REV), longest life in ms
-- Returns: 1, or 0 if the subscription is not the caller's
-- Atomic because the record of an earlier version must be deleted in the instant in which this one opens, and a trainer
-- that was replaced must not end its successor's transfer.
local function transfer_open()
  local transfer_key, sub_key = KEYS[1], KEYS[2]
  local prefix, owner, gen, id, ttl_ms = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5]

  freeing(prefix)
  if not owns(sub_key, owner, gen) then return 0 end
  redis.call('DEL', transfer_key)
  redis.call('HSET', transfer_key, 'id', id, 'st', 'open')
  redis.call('PEXPIRE', transfer_key, ttl_ms)
  count(prefix, 'transfers')
  return 1
end

-- transfer_enroll: a worker is ready to receive a version (worker).
-- KEYS: transfer:MODEL
-- ARGV: prefix, id (VERSION-REV), worker, record
-- Returns: 'open' when the worker is enrolled; 'closed' when the decision was made, or the transfer is of another
--          version
-- Atomic because a worker that is not in the decision must not be enrolled after it.
local function transfer_enroll()
  local transfer_key = KEYS[1]
  local prefix, id, worker, record = ARGV[1], ARGV[2], ARGV[3], ARGV[4]

  freeing(prefix)
  local t = redis.call('HMGET', transfer_key, 'id', 'st')
  if t[1] ~= id or t[2] ~= 'open' then return 'closed' end
  redis.call('HSET', transfer_key, 'm:' .. worker, record)
  return 'open'
end

-- transfer_decide: decide who receives a version, and how; the others load it from disk (the trainer's driver).
-- KEYS: transfer:MODEL, transfers:MODEL
-- ARGV: prefix, id (VERSION-REV), decision record
-- Returns: 1, or 0 when the current transfer is of another version
-- Atomic because the decision closes the enrollment that it uses.
local function transfer_decide()
  local transfer_key, decisions_key = KEYS[1], KEYS[2]
  local prefix, id, decision = ARGV[1], ARGV[2], ARGV[3]

  freeing(prefix)
  if redis.call('HGET', transfer_key, 'id') ~= id then return 0 end
  redis.call('HSET', transfer_key, 'st', 'closed')
  redis.call('XADD', decisions_key, 'MAXLEN', '~', 64, '*', 'id', id, 'd', decision)
  return 1
end

-- transfer_report: a worker reports that its engine is paused and may be written to, or the result; the trainer's
-- driver reports where the engine finds the weights, or that they were sent (worker, driver).
-- KEYS: transfer:MODEL
-- ARGV: prefix, id (VERSION-REV), field (f:WORKER frozen | h:WORKER where | s:WORKER sent | r:WORKER received), text
-- Returns: 1, or 0 when the current transfer is of another version
-- Atomic because a late report must not count for the next version.
local function transfer_report()
  local transfer_key = KEYS[1]
  local prefix, id, name, text = ARGV[1], ARGV[2], ARGV[3], ARGV[4]

  freeing(prefix)
  if redis.call('HGET', transfer_key, 'id') ~= id then return 0 end
  redis.call('HSET', transfer_key, name, text)
  return 1
end

-- relay_offer: an object's files, their ranges and their addresses (the trainer's driver, periodically).
-- KEYS: relay:OBJECT, relay_names, sub:NAME
-- ARGV: prefix, owner, gen, offer record, how long in ms it holds unless it is renewed, name of the object
-- Returns: 'offered' | 'owner'
-- Atomic because an offer without an expiry would outlive the trainer that serves it, a name without an offer would be
-- requested in vain, and a trainer that was replaced must not change its successor's offers; a script so that it is
-- allowed when Redis is full.
local function relay_offer()
  local relay_key, names_key, sub_key = KEYS[1], KEYS[2], KEYS[3]
  local prefix, owner, gen, record, ttl_ms, name = ARGV[1], ARGV[2], ARGV[3], ARGV[4], tonumber(ARGV[5]), ARGV[6]

  freeing(prefix)
  if not owns(sub_key, owner, gen) then return 'owner' end
  local now = now_ms()
  redis.call('SET', relay_key, record, 'PX', ttl_ms)
  redis.call('ZREMRANGEBYSCORE', names_key, '-inf', now)
  redis.call('ZADD', names_key, now + ttl_ms, name)
  if redis.call('PTTL', names_key) < ttl_ms then redis.call('PEXPIRE', names_key, ttl_ms) end
  return 'offered'
end

-- relay_claim: a range that a worker may fetch from the trainer itself, because no peer has it (worker).
-- KEYS: relay:OBJECT, relay_peers:OBJECT, relay_slot:OBJECT:1, relay_slot:OBJECT:2, relay_taken:OBJECT
-- ARGV: prefix, object, worker, how long in ms the claim holds, number of ranges, range that its peers have and failed
--       to send (-1: none): it may be claimed when all others are taken
-- Returns: the range; -1: both slots are taken, there is nothing left to claim, or no offer
-- Atomic because two workers must not be given the same range, nor a third one a slot: the trainer's link carries the
-- claimed ranges.
local function relay_claim()
  local relay_key, peers_key, slot_key, other_slot_key, taken_key = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5]
  local prefix, object, worker, claim_ms = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
  local num_ranges, wanted = tonumber(ARGV[5]), tonumber(ARGV[6])

  freeing(prefix)
  if redis.call('EXISTS', relay_key) == 0 then return -1 end
  local free, claimed = nil, {}
  for _, key in ipairs({slot_key, other_slot_key}) do
    cap_lease(key, claim_ms)
    local holder, range = string.match(redis.call('GET', key) or '', '^(.*) (%d+)$')
    if holder == worker then
      redis.call('PEXPIRE', key, claim_ms)
      return tonumber(range)
    end
    if holder then claimed[#claimed + 1] = tonumber(range) else free = free or key end
  end
  if not free then return -1 end

  -- a peer whose record expired is gone, and the ranges that only it had are assigned again, like those of no worker
  local longest = math.ceil(num_ranges / 8)
  redis.call('DEL', taken_key)
  for _, peer in ipairs(redis.call('HKEYS', peers_key)) do
    local have_key = prefix .. 'relay_have:' .. object .. ':' .. peer
    local length = redis.call('STRLEN', have_key)
    if length > 0 and length <= longest then redis.call('BITOP', 'OR', taken_key, taken_key, have_key)
    else redis.call('HDEL', peers_key, peer) end
  end
  for _, range in ipairs(claimed) do redis.call('SETBIT', taken_key, range, 1) end
  local range, is_taken = redis.call('BITPOS', taken_key, 0), false
  redis.call('DEL', taken_key)
  if range < 0 or range >= num_ranges then range = wanted end
  for _, other in ipairs(claimed) do is_taken = is_taken or other == range end
  if range < 0 or is_taken then return -1 end
  redis.call('SET', free, worker .. ' ' .. string.format('%.0f', range), 'PX', claim_ms)
  return range
end

-- relay_have: record which ranges of an object a worker has and serves, and which it fetches from the trainer (worker,
-- with each range that it gets, and periodically).
-- KEYS: relay_peers:OBJECT, relay_have:OBJECT:WORKER, relay_slot:OBJECT:1, relay_slot:OBJECT:2
-- ARGV: prefix, worker, url, bitmap of ranges, how long in ms this holds unless it is renewed, range that it claims
--       still (-1: none), how long in ms a claim holds
-- Returns: 1
-- Atomic because a range must be announced before its claim ends: otherwise it would be assigned again in between.
local function relay_have()
  local peers_key, have_key, slot_key, other_slot_key = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
  local prefix, worker, url, bitmap, ttl_ms = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5]
  local claim, claim_ms = ARGV[6], ARGV[7]

  freeing(prefix)
  redis.call('SET', have_key, bitmap, 'PX', ttl_ms)
  redis.call('HSET', peers_key, worker, url)
  redis.call('PEXPIRE', peers_key, ttl_ms)
  for _, key in ipairs({slot_key, other_slot_key}) do
    local holder, range = string.match(redis.call('GET', key) or '', '^(.*) (%d+)$')
    if holder == worker and range == claim then redis.call('PEXPIRE', key, claim_ms)
    elseif holder == worker then redis.call('DEL', key) end
  end
  return 1
end
