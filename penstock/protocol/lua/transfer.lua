-- Distribution of weights without a shared disk: a transfer sends a version to the workers that enrolled for it; an
-- offer tells where the trainer serves a version over HTTP.
-- Keys: transfer:MODEL, transfers:MODEL, offer:MODEL:OBJECT

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

-- offer_weights: where the trainer serves a version (the trainer's driver, periodically).
-- KEYS: offer:MODEL:OBJECT, sub:NAME
-- ARGV: prefix, owner, gen, offer record, how long in ms it holds unless it is renewed
-- Returns: 'offered' | 'owner'
-- Atomic because a trainer that was replaced must not change its successor's offers; a script so that it is allowed
-- when Redis is full.
local function offer_weights()
  local offer_key, sub_key = KEYS[1], KEYS[2]
  local prefix, owner, gen, record, ttl_ms = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5]

  freeing(prefix)
  if not owns(sub_key, owner, gen) then return 'owner' end
  redis.call('SET', offer_key, record, 'PX', ttl_ms)
  return 'offered'
end
