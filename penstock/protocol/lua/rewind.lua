-- rewind: any batch after n is delivered again, in the same order (leader rank of a restored trainer).
-- KEYS: sub:NAME, batches:NAME, clock, weights:MODEL, subs
-- ARGV: prefix, owner, gen, n, version field of clock ('' when the trainer does not publish)
-- Returns: {'rewound' | 'owner' | 'floor' | 'cursor', gen, floor}
-- Atomic because what was published after n is abandoned (T1) in the instant in which the cursor goes back.
local n = tonumber(ARGV[4])
freeing(ARGV[1])
if not owns(KEYS[1], ARGV[2], ARGV[3]) then return {'owner', 0, 0} end
local s = redis.call('HMGET', KEYS[1], 'cursor', 'floor', 'ckpt', 'gen', 'abandoned')
local cursor, floor, ckpt = tonumber(s[1] or 0), tonumber(s[2] or 0), tonumber(s[3] or 0)
local gen = tonumber(s[4] or 0)
if n < floor then return {'floor', gen, floor} end
if n > cursor then return {'cursor', gen, cursor} end
local found = redis.call('XRANGE', KEYS[2], n .. '-0', n .. '-0')
local cum = #found == 1 and field(found[1][2], 'cum') or '0'
gen = gen + 1
redis.call('HSET', KEYS[1], 'gen', gen, 'cursor', n, 'ckpt', math.min(ckpt, n), 'through', n, 'p', cum,
  'bits', '', 'ask', 0, 'restored', ARGV[5] ~= '' and '1' or '0', 'again', '0')
redis.call('HDEL', KEYS[1], 'ended')
-- no role has a file of what comes now
for role in string.gmatch(redis.call('HGET', KEYS[1], 'roles') or '', '[^,]+') do
  local had = tonumber(redis.call('HGET', KEYS[1], 'ckpt:' .. role) or 0)
  redis.call('HSET', KEYS[1], 'ckpt:' .. role, math.min(had, n))
end
if ARGV[5] ~= '' then
  local clock = tonumber(redis.call('HGET', KEYS[3], ARGV[5]) or 0)
  -- the restored weights are those of the last publication that consumed no batch after n
  local restored = 0
  for _, p in ipairs(redis.call('XREVRANGE', KEYS[4], '+', '-')) do
    if tonumber(field(p[2], 't')) <= n then
      restored = tonumber(string.match(p[1], '^(%d+)'))
      -- it consumed all up to n: the next publication is of the same weights
      if tonumber(field(p[2], 't')) == n then redis.call('HSET', KEYS[1], 'again', '1') end
      break
    end
  end
  if clock > restored then
    local span = (restored + 1) .. '-' .. clock
    redis.call('HSET', KEYS[1], 'abandoned', s[5] and s[5] ~= '' and s[5] .. ',' .. span or span)
    -- a cut for another subscription of this model was planned on versions that are gone now
    redis.call('HINCRBY', KEYS[5], 'rev', 1)
    event(ARGV[1], 'rewound', '', '')
  end
end
count(ARGV[1], 'rewinds')
return {'rewound', gen, floor}
