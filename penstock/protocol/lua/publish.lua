-- publish: committed -> published; the clock moves (driver).
-- KEYS: clock, sub:NAME, batches:NAME, weights:MODEL, steps:MODEL
-- ARGV: prefix, owner, gen, version field of clock, version, through, step, rev, publication record,
--       newest known version: above the clock only when a failover lost publications
-- Returns: {'published' | 'already' | 'owner' | 'version' | 'through', version of the clock}
-- Atomic because the gate counts a batch as consumed in the instant in which its version can be loaded (T3),
-- and a version names one set of weights for ever (T1).
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
