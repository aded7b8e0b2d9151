-- publish: committed -> published; the clock moves (driver).
-- KEYS: clock, sub:NAME, batches:NAME, weights:MODEL, steps:MODEL
-- ARGV: prefix, owner, gen, version field of clock, version, through, step, rev, publication record,
--       newest version that anybody knows: above the clock only when a failover lost publications
-- Returns: {'published' | 'already' | 'owner' | 'version' | 'through', version of the clock}
-- Atomic because the gate counts a batch as consumed in the instant in which its version can be loaded (T3),
-- and a version names one set of weights for ever (T1).
local prefix, version, through, rev = ARGV[1], tonumber(ARGV[5]), tonumber(ARGV[6]), tonumber(ARGV[8])
freeing(prefix)
if not owns(KEYS[2], ARGV[2], ARGV[3]) then return {'owner', 0} end
local clock = tonumber(redis.call('HGET', KEYS[1], ARGV[4]) or 0)
local known = math.max(clock, tonumber(ARGV[10] or 0))
local id = version .. '-' .. rev
local s = redis.call('HMGET', KEYS[2], 'cursor', 'through', 'restored', 'again', 'repeats')
if version == clock then
  local found = redis.call('XRANGE', KEYS[4], id, id)
  if #found == 1 and field(found[1][2], 'g') == ARGV[3] and field(found[1][2], 'p') == ARGV[9] then
    return {'already', clock}
  end
end
if version ~= (rev > 0 and clock or known + 1) then return {'version', clock} end
if rev == 0 then
  local cursor, last = tonumber(s[1] or 0), tonumber(s[2] or 0)
  -- the first one of a trainer, or of one that was restored, consumes nothing new
  local first = not s[2] or s[3] == '1'
  if through > cursor or through < last or (through == last and not first) then return {'through', clock} end
  local found = redis.call('XRANGE', KEYS[3], through .. '-0', through .. '-0')
  local cum = #found == 1 and tonumber(field(found[1][2], 'cum')) or 0
  -- engines may hold what was lost under these numbers: they name no policy of this lineage any more
  if known > clock then
    local old, span = redis.call('HGET', KEYS[2], 'abandoned'), (clock + 1) .. '-' .. known
    redis.call('HSET', KEYS[2], 'abandoned', old and old ~= '' and old .. ',' .. span or span)
    event(prefix, 'rewound', '', '')
  end
  redis.call('HSET', KEYS[1], ARGV[4], version, 'step', ARGV[7])
  -- batches behind each version, for the lag in optimizer steps
  redis.call('HSET', KEYS[5], version, through)
  redis.call('HDEL', KEYS[5], version - 256)
  redis.call('HSET', KEYS[2], 'through', through, 'p', cum, 'restored', '0', 'again', '0')
  -- the weights of the version that was restored once more: nothing grows older by it
  if s[4] == '1' and through == last then
    redis.call('HSET', KEYS[2], 'repeats', s[5] and s[5] ~= '' and s[5] .. ',' .. version or version)
  end
end
-- a rewind looks back for the version that a batch led to; 256 publications reach far enough
redis.call('XADD', KEYS[4], 'MAXLEN', '~', 256, id, 'p', ARGV[9], 'g', ARGV[3], 't', through)
count(prefix, 'published')
event(prefix, 'published', '', '')
poke(prefix .. 'gate')
poke(prefix .. 'wake', 8)
return {'published', version}
