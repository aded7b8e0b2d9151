-- A subscription: its definition, its owner, and its position among its batches.
-- Keys: subs, sub:NAME, owner:NAME

-- Return the name under which groups count the uses of a subscription: its own, or its pool's.
local function account_of(sub_key, name)
  local share = redis.call('HGET', sub_key, 'share')
  return share and share ~= '' and 'share:' .. share or name
end

local function owns(key, owner, gen)
  local s = redis.call('HMGET', key, 'owner', 'gen')
  return s[1] == owner and s[2] == gen
end

-- Take from a member of a pool what was cut for it and not committed; the other members may use the groups again. Batch
-- numbers are reused, so the stream is rewritten: the id of an entry never decreases by itself. Returns the groups.
local function give_back(prefix, name, sub_key, batches_key)
  local s = numbers_of(sub_key, 'cursor', 'cut')
  if not s then return 0 end -- the committed batches are not known, and no group may be used twice
  local cursor, cut, given = s[1], s[2], 0
  if cut <= cursor then return 0 end
  local used, last, uses, bore = 'u:' .. account_of(sub_key, name), 'b:' .. name, 'h:' .. name, 'l:' .. name
  for _, entry in ipairs(redis.call('XRANGE', batches_key, (cursor + 1) .. '-0', '+')) do
    for job in string.gmatch(field(entry[2], 'j') or '', '[^,]+') do
      local key = group_key_of(prefix, job)
      if redis.call('EXISTS', key) == 1 and tonumber(redis.call('HGET', key, used) or 0) > 0 then
        redis.call('HDEL', key, used, last, uses, bore) -- a pool uses a group once
        given = given + 1
      end
    end
  end
  local kept, cum = redis.call('XRANGE', batches_key, '-', cursor .. '-0'), 0
  redis.call('DEL', batches_key)
  for _, entry in ipairs(kept) do
    redis.call('XADD', batches_key, entry[1], unpack(entry[2]))
    if entry[1] == cursor .. '-0' then cum = field(entry[2], 'cum') end
  end
  redis.call('HSET', sub_key, 'cut', cursor, 'cum', cum, 'ask', 0, 'bits', '')
  return given
end

-- subscribe: make or change a subscription's definition.
-- KEYS: subs, sub:NAME
-- ARGV: prefix, name, revision it was planned at ('': any), by an operator (0|1),
--       fields that the members of a pool must agree on (with commas), then field, value, ... of the definition
-- Returns: {revision of subs}; {-1}: one of this name was dropped before, {-5}: its pool was; {-2}: the revision moved;
--          {-3, field}: a field that cannot change once there are groups;
--          {-6, its mode, the one asked for}: groups were admitted and are cut by its mode;
--          {-7, its sampler, the one asked for}: one of them is cohort, which counts places as the other does not;
--          {-4, field, member}: a pool's members must agree on it
-- Atomic because a cut or a seal that was planned on the old definition must see another revision.
-- An operator's values stay when the trainer returns with its own definition; an operator's empty value removes them.
local function subscribe()
  local subs_key, sub_key = KEYS[1], KEYS[2]
  local prefix, name, planned_revision, by_operator = ARGV[1], ARGV[2], ARGV[3], ARGV[4] == '1'
  local agreed, first_field = ARGV[5], 6

  freeing(prefix)
  begin(prefix)
  -- groups remember the uses of the one that was dropped
  if redis.call('HEXISTS', subs_key, 'was:' .. name) == 1 then return {-1} end
  local rev = redis.call('HGET', subs_key, 'rev') or '0'
  if planned_revision ~= '' and planned_revision ~= rev then return {-2} end
  local live = redis.call('HGET', subs_key, 'sub:' .. name) == 'live'
  local given, new = {}, {}
  for i = first_field, #ARGV, 2 do
    local f, v = ARGV[i], ARGV[i + 1]
    given[#given + 1] = f
    if by_operator or redis.call('HEXISTS', sub_key, 'set:' .. f) == 0 then new[f] = v end
  end
  local mode = live and redis.call('HGET', sub_key, 'mode')
  if mode and new['mode'] and new['mode'] ~= mode then return {-6, mode, new['mode']} end
  -- a cohort counts the places it passed, others the groups they used and disposed of: neither count can continue the
  -- other
  local sampler = live and (redis.call('HGET', sub_key, 'sampler') or 'fifo')
  if sampler and new['sampler'] and (new['sampler'] == 'cohort') ~= (sampler == 'cohort') then
    return {-7, sampler, new['sampler']}
  end
  -- groups record uses by pool, and places at the gate by the size of what consumed them
  local account = new['share'] or redis.call('HGET', sub_key, 'share') or ''
  if live and account ~= (redis.call('HGET', sub_key, 'share') or '') then return {-3, 'share'} end
  if account ~= '' then
    if redis.call('HEXISTS', subs_key, 'was:share:' .. account) == 1 then return {-5} end
    for _, f in ipairs(redis.call('HKEYS', subs_key)) do
      local other = string.match(f, '^sub:(.*)$')
      if other and other ~= name then
        local key = prefix .. 'sub:' .. other
        if redis.call('HGET', key, 'share') == account then
          for g in string.gmatch(agreed, '[^,]+') do
            if new[g] and new[g] ~= (redis.call('HGET', key, g) or '') then return {-4, g, other} end
          end
        end
      end
    end
    redis.call('HSETNX', subs_key, 'start:' .. account, redis.call('HGET', prefix .. 'counters', 'gone:train') or 0)
  end
  local changed = not live
  -- groups that were gone before it subscribed are not of its stock at the gate
  if changed then
    redis.call('HSETNX', sub_key, 'start', redis.call('HGET', prefix .. 'counters', 'gone:train') or 0)
    redis.call('HSETNX', sub_key, 'seen', now_ms())
    local from = new['from'] or 'oldest'
    local since, version = string.match(from, '^completed:(%d+)$'), string.match(from, '^version:(%d+)$')
    if from == 'newest' then since = redis.call('HGET', prefix .. 'counters', 'completed') or 0 end
    if since then redis.call('HSETNX', sub_key, 'since', since) end
    if version then redis.call('HSETNX', sub_key, 'since_version', version) end
  end
  for _, f in ipairs(given) do
    local v = new[f]
    if v and by_operator and v == '' then
      redis.call('HDEL', sub_key, 'set:' .. f)
    elseif v then
      if by_operator then redis.call('HSET', sub_key, 'set:' .. f, 1) end
      if f == 'gb' and (new['unit'] or redis.call('HGET', sub_key, 'unit') or 'groups') ~= 'groups' then
        redis.call('HSETNX', sub_key, f, v) -- cuts compute exactly what a version consumes
      elseif redis.call('HGET', sub_key, f) ~= v then
        redis.call('HSET', sub_key, f, v)
        changed = true
      end
    end
  end
  if not changed then return {tonumber(rev)} end
  redis.call('HSETNX', sub_key, 'gen', 0)
  redis.call('HSET', subs_key, 'sub:' .. name, 'live')
  event(prefix, 'subs', '', '')
  poke(prefix .. 'gate')
  return {redis.call('HINCRBY', subs_key, 'rev', 1)}
end

-- unsubscribe: drop a subscription; its groups no longer wait for it (operator, or a trainer that is finished).
-- KEYS: subs, sub:NAME, batches:NAME, owner:NAME, orders:NAME
-- ARGV: prefix, name
-- Returns: 1, or 0 when there was none
-- Atomic because a seal must see either all of it or none. The name cannot be used again: groups remember its uses.
-- Uncommitted batches of a pool's member go to the other members; committed ones stay consumed.
local function unsubscribe()
  local subs_key, sub_key, batches_key, owner_key, orders_key = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5]
  local prefix, name = ARGV[1], ARGV[2]

  freeing(prefix)
  if redis.call('HDEL', subs_key, 'sub:' .. name) == 0 then return 0 end
  redis.call('HSET', subs_key, 'was:' .. name, number_of(redis.call('HGET', sub_key, 'ckpt')) or 0)
  local share = redis.call('HGET', sub_key, 'share') or ''
  if share ~= '' then
    give_back(prefix, name, sub_key, batches_key)
    local s = redis.call('HMGET', sub_key, 'cum', 'disposed')
    redis.call('HINCRBY', subs_key, 'gone:' .. share, (number_of(s[1]) or 0) + (number_of(s[2]) or 0))
    local left = false
    for _, f in ipairs(redis.call('HKEYS', subs_key)) do
      local other = string.match(f, '^sub:(.*)$')
      if other and redis.call('HGET', prefix .. 'sub:' .. other, 'share') == share then left = true end
    end
    if not left then redis.call('HSET', subs_key, 'was:share:' .. share, 1) end
  end
  redis.call('DEL', sub_key, batches_key, owner_key, orders_key, prefix .. 'trained:' .. name)
  redis.call('HINCRBY', subs_key, 'rev', 1)
  event(prefix, 'subs', '', '')
  poke(prefix .. 'gate')
  return 1
end

-- join: a trainer takes the ownership of its subscription, or keeps it (heartbeat of its leader rank).
-- KEYS: sub:NAME, owner:NAME, subs
-- ARGV: prefix, owner's token, lease in ms, 1: only if it is the caller's already, an id that the ranks of its
--       job have in common ('': not known)
-- Returns: {1, gen, cursor, cut, ckpt, floor} | {0, ms until the present owner's lease ends} | {-1}: it was dropped
-- Atomic because one subscription has one owner: two trainers with one name would each train half of it.
local function join()
  local sub_key, owner_key, subs_key = KEYS[1], KEYS[2], KEYS[3]
  local prefix, owner, lease_ms, only_renew, job = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5]

  freeing(prefix)
  local name = string.sub(sub_key, #prefix + #'sub:' + 1)
  -- its keys are deleted, and new ones would never be freed
  if redis.call('HEXISTS', subs_key, 'was:' .. name) == 1 then return {-1} end
  local holder = redis.call('GET', owner_key)
  if holder and holder ~= owner then
    cap_lease(owner_key, lease_ms)
    return {0, redis.call('PTTL', owner_key)}
  end
  if only_renew == '1' and redis.call('HGET', sub_key, 'owner') ~= owner then return {0, -1} end
  if holder then redis.call('PEXPIRE', owner_key, lease_ms) else redis.call('SET', owner_key, owner, 'PX', lease_ms) end
  if redis.call('HGET', sub_key, 'owner') ~= owner then
    redis.call('HSET', sub_key, 'owner', owner, 'bits', '', 'job', job)
    redis.call('HDEL', sub_key, 'ended')
  end
  redis.call('HSET', sub_key, 'seen', now_ms())
  if redis.call('HDEL', sub_key, 'parked') == 1 then
    redis.call('HINCRBY', subs_key, 'rev', 1)
    event(prefix, 'subs', '', '')
  end
  local s = redis.call('HMGET', sub_key, 'gen', 'cursor', 'cut', 'ckpt', 'floor')
  return {1, tonumber(s[1] or 0), tonumber(s[2] or 0), tonumber(s[3] or 0), tonumber(s[4] or 0), tonumber(s[5] or 0)}
end

-- leave: a trainer releases its ownership, so that the next one need not wait for its lease to end.
-- KEYS: owner:NAME
-- ARGV: owner's token
-- Returns: 1, or 0 when it was not the caller's
-- Atomic because a successor's ownership must not be deleted.
local function leave()
  local owner_key = KEYS[1]
  local owner = ARGV[1]

  if redis.call('GET', owner_key) ~= owner then return 0 end
  return redis.call('DEL', owner_key)
end

-- park: a subscription whose owner has been gone for longer than its retention no longer blocks others (leader).
-- KEYS: leader, subs, sub:NAME, batches:NAME, owner:NAME
-- ARGV: prefix, epoch, token, revision of subs, name, longest absence in ms
-- Returns: {'parked', groups given back} | {'present'} | {'parked already'} | {'contact'} | {'subs'}, or -1 when the
--          leadership is lost
-- Atomic because an owner that returns meanwhile keeps everything. Batches that a member of a pool had cut and not
-- committed go to the others, and a later commit of them is refused (gen): each group is used once (I5).
local function park()
  local leader_key, subs_key, sub_key, batches_key, owner_key = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5]
  local prefix, epoch, token = ARGV[1], ARGV[2], ARGV[3]
  local revision, sub, absent_ms = ARGV[4], ARGV[5], tonumber(ARGV[6])

  local BACK_MS, GAP_MS = 15000, 2000
  freeing(prefix)
  if not leads(leader_key, epoch, token) then return -1 end
  if (redis.call('HGET', subs_key, 'rev') or '0') ~= revision then return {'subs'} end
  -- a trainer that could not renew during an outage is back within this time
  local grace = math.min(absent_ms, BACK_MS)
  if contact(prefix, 'park:' .. sub, math.max(GAP_MS, grace / 2)) <= grace then return {'contact'} end
  local s = redis.call('HMGET', sub_key, 'seen', 'parked', 'share')
  if redis.call('EXISTS', owner_key) == 1 or now_ms() - tonumber(s[1] or 0) <= absent_ms then return {'present'} end
  if s[2] == '1' then return {'parked already'} end
  local given = 0
  if (s[3] or '') ~= '' then
    given = give_back(prefix, sub, sub_key, batches_key)
    redis.call('HINCRBY', sub_key, 'gen', 1)
    redis.call('HSET', sub_key, 'owner', '')
  end
  redis.call('HSET', sub_key, 'parked', '1', 'ask', 0)
  redis.call('HINCRBY', subs_key, 'rev', 1)
  event(prefix, 'subs', '', '')
  poke(prefix .. 'gate')
  return {'parked', given}
end

-- ask: a trainer reports that it waits for batch n, so that it is cut then and not before (late, fresh).
-- KEYS: sub:NAME
-- ARGV: prefix, sub, n, owner, gen
-- Returns: 1, or 0 when the subscription is not the caller's
-- Atomic because an abandoned trainer must not make the buffer cut.
local function ask()
  local sub_key = KEYS[1]
  local prefix, sub, n, owner, gen = ARGV[1], ARGV[2], tonumber(ARGV[3]), ARGV[4], ARGV[5]

  freeing(prefix) -- a full Redis is emptied by trainers that continue
  if not owns(sub_key, owner, gen) then return 0 end
  -- other roles begin when the driver does, not before it has rewound (T13)
  redis.call('HSET', sub_key, 'asker', owner)
  if tonumber(redis.call('HGET', sub_key, 'ask') or 0) < n then
    redis.call('HSET', sub_key, 'ask', n)
    event(prefix, 'ask', '', sub)
  end
  return 1
end

-- checkpointed: committed -> durable up to n; the caller's role has a checkpoint file (leader rank of each role).
-- KEYS: sub:NAME
-- ARGV: prefix, owner, gen, n, role ('' if the subscription has none)
-- Returns: 1, 0 when the subscription is not the caller's, -1 when n is not committed
-- Atomic because groups may be retired from this instant on: a batch is durable when every role has it in a file (T13).
local function checkpointed()
  local sub_key = KEYS[1]
  local prefix, owner, gen, n, role = ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[4]), ARGV[5]

  freeing(prefix)
  if not owns(sub_key, owner, gen) then return 0 end
  local s = redis.call('HMGET', sub_key, 'cursor', 'ckpt', 'roles')
  local roles = s[3] or ''
  if n > tonumber(s[1] or 0) then return -1 end
  if roles ~= '' then
    redis.call('HSET', sub_key, 'ckpt:' .. role, n)
    for name in string.gmatch(roles, '[^,]+') do
      n = math.min(n, tonumber(redis.call('HGET', sub_key, 'ckpt:' .. name) or 0))
    end
  end
  if n > tonumber(s[2] or 0) then
    redis.call('HSET', sub_key, 'ckpt', n)
    event(prefix, 'checkpointed', '', '')
  end
  return 1
end

-- rewind: deliver every batch after n again, in the same order (leader rank of a restored trainer).
-- KEYS: sub:NAME, batches:NAME, clock, weights:MODEL, subs
-- ARGV: prefix, owner, gen, n, version field of clock ('' when the trainer does not publish)
-- Returns: {'rewound' | 'owner' | 'floor' | 'cursor', gen, floor}
-- Atomic because what was published after n is abandoned (T1) in the instant in which the cursor goes back.
local function rewind()
  local sub_key, batches_key, clock_key, weights_key, subs_key = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5]
  local prefix, owner, gen, n, clock_field = ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[4]), ARGV[5]

  freeing(prefix)
  if not owns(sub_key, owner, gen) then return {'owner', 0, 0} end
  gen = tonumber(gen)
  local s = redis.call('HMGET', sub_key, 'cursor', 'floor', 'ckpt', 'abandoned')
  local cursor, floor, ckpt = tonumber(s[1] or 0), tonumber(s[2] or 0), tonumber(s[3] or 0)
  if n < floor then return {'floor', gen, floor} end
  if n > cursor then return {'cursor', gen, cursor} end
  local found = redis.call('XRANGE', batches_key, n .. '-0', n .. '-0')
  local cum = #found == 1 and field(found[1][2], 'cum') or '0'
  gen = gen + 1
  redis.call('HSET', sub_key, 'gen', gen, 'cursor', n, 'ckpt', math.min(ckpt, n), 'through', n, 'p', cum,
    'bits', '', 'ask', 0, 'restored', clock_field ~= '' and '1' or '0', 'again', '0')
  redis.call('HDEL', sub_key, 'ended')
  -- no role has a checkpoint of the batches that follow
  for role in string.gmatch(redis.call('HGET', sub_key, 'roles') or '', '[^,]+') do
    local had = tonumber(redis.call('HGET', sub_key, 'ckpt:' .. role) or 0)
    redis.call('HSET', sub_key, 'ckpt:' .. role, math.min(had, n))
  end
  if clock_field ~= '' then
    local clock = tonumber(redis.call('HGET', clock_key, clock_field) or 0)
    -- the restored weights are those of the last publication that consumed no batch after n
    local restored = 0
    for _, p in ipairs(redis.call('XREVRANGE', weights_key, '+', '-')) do
      if tonumber(field(p[2], 't')) <= n then
        restored = tonumber(string.match(p[1], '^(%d+)'))
        -- it consumed all up to n: the next publication is of the same weights
        if tonumber(field(p[2], 't')) == n then redis.call('HSET', sub_key, 'again', '1') end
        break
      end
    end
    if clock > restored then
      local span = (restored + 1) .. '-' .. clock
      redis.call('HSET', sub_key, 'abandoned', s[4] and s[4] ~= '' and s[4] .. ',' .. span or span)
      -- a cut for another subscription of this model was planned on versions that are abandoned now
      redis.call('HINCRBY', subs_key, 'rev', 1)
      event(prefix, 'rewound', '', '')
    end
  end
  count(prefix, 'rewinds')
  return {'rewound', gen, floor}
end
