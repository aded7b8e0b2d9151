-- A publication: a version of a model's weights that a trainer announces, and the copies of it.
-- Keys: clock, weights:MODEL, steps:MODEL, whole:MODEL, orders:NAME

-- publish: committed -> published; the clock moves (driver).
-- KEYS: clock, sub:NAME, batches:NAME, weights:MODEL, steps:MODEL
-- ARGV: prefix, owner, gen, version field of clock, version, through, step, rev, publication record,
--       newest known version: above the clock only when a failover lost publications
-- Returns: {'published' | 'already' | 'owner' | 'version' | 'through', version of the clock}
-- Atomic because the gate counts a batch as consumed in the instant in which its version can be loaded (T3),
-- and a version names one set of weights for ever (T1).
local function publish()
  local clock_key, sub_key, batches_key, weights_key, steps_key = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5]
  local prefix, owner, gen, clock_field = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
  local version, through, step, rev = tonumber(ARGV[5]), tonumber(ARGV[6]), ARGV[7], tonumber(ARGV[8])
  local record, newest = ARGV[9], tonumber(ARGV[10])

  freeing(prefix)
  if not owns(sub_key, owner, gen) then return {'owner', 0} end
  local clock = tonumber(redis.call('HGET', clock_key, clock_field) or 0)
  local known = math.max(clock, newest)
  local id = version .. '-' .. rev
  local s = redis.call('HMGET', sub_key, 'cursor', 'through', 'restored', 'again', 'repeats')
  if version == clock then
    local found = redis.call('XRANGE', weights_key, id, id)
    if #found == 1 and field(found[1][2], 'g') == gen and field(found[1][2], 'p') == record then
      return {'already', clock}
    end
  end
  if version ~= (rev > 0 and clock or known + 1) then return {'version', clock} end
  if rev == 0 then
    local cursor, last = tonumber(s[1] or 0), tonumber(s[2] or 0)
    -- the first publication of a trainer, or after a restore, consumes nothing new
    local first = not s[2] or s[3] == '1'
    if through > cursor or through < last or (through == last and not first) then return {'through', clock} end
    local found = redis.call('XRANGE', batches_key, through .. '-0', through .. '-0')
    local cum = #found == 1 and tonumber(field(found[1][2], 'cum')) or 0
    -- engines may hold lost publications under these numbers: they belong to no policy of this lineage any more
    if known > clock then
      local old, span = redis.call('HGET', sub_key, 'abandoned'), (clock + 1) .. '-' .. known
      redis.call('HSET', sub_key, 'abandoned', old and old ~= '' and old .. ',' .. span or span)
      event(prefix, 'rewound', '', '')
    end
    redis.call('HSET', clock_key, clock_field, version, 'step', step)
    -- batches behind each version, for the lag in optimizer steps
    redis.call('HSET', steps_key, version, through)
    redis.call('HDEL', steps_key, version - 256)
    redis.call('HSET', sub_key, 'through', through, 'p', cum, 'restored', '0', 'again', '0')
    -- the weights of the restored version again: they age nothing
    if s[4] == '1' and through == last then
      redis.call('HSET', sub_key, 'repeats', s[5] and s[5] ~= '' and s[5] .. ',' .. version or version)
    end
  end
  -- a rewind searches for the version of a batch; 256 publications are enough
  redis.call('XADD', weights_key, 'MAXLEN', '~', 256, id, 'p', record, 'g', gen, 't', through)
  count(prefix, 'published')
  event(prefix, 'published', '', '')
  poke(prefix .. 'gate')
  poke(prefix .. 'wake', 8)
  return {'published', version}
end

-- whole: the folder of an announced version is complete, verified and synced (the trainer's driver, after the
-- announcement).
-- KEYS: clock, sub:NAME, whole:MODEL
-- ARGV: prefix, owner, gen, version field of clock, version, record
-- Returns: 'whole' | 'already' | 'owner' | 'version' (it was not announced)
-- Atomic because a number above the clock names no weights yet, and another owner may publish others under it (T1).
local function whole()
  local clock_key, sub_key, whole_key = KEYS[1], KEYS[2], KEYS[3]
  local prefix, owner, gen, clock_field = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
  local version, record = tonumber(ARGV[5]), ARGV[6]

  freeing(prefix)
  if not owns(sub_key, owner, gen) then return 'owner' end
  local clock = tonumber(redis.call('HGET', clock_key, clock_field) or 0)
  if version < 1 or version > clock then return 'version' end
  if redis.call('HGET', whole_key, version) == record then return 'already' end
  redis.call('HSET', whole_key, version, record)
  -- as many as there are publications to load
  for _, old in ipairs(redis.call('HKEYS', whole_key)) do
    if tonumber(old) <= clock - 256 then redis.call('HDEL', whole_key, old) end
  end
  return 'whole'
end

-- order: rank 0 gives the next order of a publication to all ranks of its role, and reads which of them have arrived.
-- KEYS: sub:NAME, orders:NAME
-- ARGV: prefix, owner, gen, call (its publications of sharded weights so far), place (of the order in it, from 0),
--       order, ranks, seconds it is kept
-- Returns: {'owner'}, or {'ok', place that rank 1 waits for, ...}; -1 if a rank has not come to this publication
-- Atomic because an order of an older owner or generation must not be followed.
local function order()
  local sub_key, orders_key = KEYS[1], KEYS[2]
  local prefix, owner, gen, call, place = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5]
  local order, num_ranks, ttl_s = ARGV[6], tonumber(ARGV[7]), ARGV[8]

  freeing(prefix)
  if not owns(sub_key, owner, gen) then return {'owner'} end
  local mark = owner .. ' ' .. call .. ' '
  redis.call('HSET', orders_key, 'at', mark .. place, 'o:' .. place, mark .. order)
  redis.call('EXPIRE', orders_key, ttl_s)
  local waited_for = {'ok'}
  for rank = 1, num_ranks - 1 do
    local at = redis.call('HGET', orders_key, 'r:' .. rank) or ''
    local came = string.sub(at, 1, #mark) == mark
    waited_for[#waited_for + 1] = came and tonumber(string.sub(at, #mark + 1)) or -1
  end
  return waited_for
end

-- hear: a rank other than 0 reports for which order of a publication it waits, and reads it (each of them).
-- KEYS: sub:NAME, orders:NAME, owner:NAME
-- ARGV: prefix, owner, call (its publications of sharded weights so far), place of the order, rank, seconds it is kept,
--       most bytes of an order that are returned
-- Returns: {'owner'}, or {'ok', order ('': not given yet), call of rank 0's last order (0: none), 1 while the owner's
--          lease runs}
-- Atomic because a rank of an older owner must not count as arrived.
local function hear()
  local sub_key, orders_key, owner_key = KEYS[1], KEYS[2], KEYS[3]
  local prefix, owner, call, place, rank, ttl_s = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5], ARGV[6]
  local most = tonumber(ARGV[7])

  freeing(prefix)
  if redis.call('HGET', sub_key, 'owner') ~= owner then return {'owner'} end
  local mark = owner .. ' ' .. call .. ' '
  redis.call('HSET', orders_key, 'r:' .. rank, mark .. place)
  redis.call('EXPIRE', orders_key, ttl_s)
  local order = redis.call('HGET', orders_key, 'o:' .. place) or ''
  local at = redis.call('HGET', orders_key, 'at') or ''
  local last = string.sub(at, 1, #owner + 1) == owner .. ' ' and string.match(at, ' (%d+) %d+$') or '0'
  local heard = string.sub(order, 1, #mark) == mark and string.sub(order, #mark + 1, #mark + most) or ''
  return {'ok', heard, tonumber(last), redis.call('GET', owner_key) == owner and 1 or 0}
end
