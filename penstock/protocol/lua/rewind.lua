-- rewind: deliver every batch after n again, in the same order (leader rank of a restored trainer).
-- KEYS: sub:NAME, batches:NAME, clock, weights:MODEL, subs
-- ARGV: prefix, owner, gen, n, version field of clock ('' when the trainer does not publish)
-- Returns: {'rewound' | 'owner' | 'floor' | 'cursor', gen, floor}
-- Atomic because what was published after n is abandoned (T1) in the instant in which the cursor goes back.
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
