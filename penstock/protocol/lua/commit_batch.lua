-- commit_batch: cut -> committed (each rank of each role; the last one's bit moves the cursor).
-- KEYS: sub:NAME, batches:NAME
-- ARGV: prefix, owner, gen, n, manifest's digest, rank, ranks, role ('' if the subscription has none)
-- Returns: {'committed' | 'waiting' | 'already' | 'owner' | 'order' | 'diverged' | 'unknown' | 'role', cursor, bits};
--          bits: 'ROLE:0110,ROLE:' of every role, 1 for each rank that has committed the batch; with 'order' those of
--          the batch after the cursor, which has to be committed first
-- Atomic because the cursor moves once per batch, when every rank of every role has committed it (T13, T15).
local sub_key, batches_key = KEYS[1], KEYS[2]
local prefix, owner, gen, n = ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[4])
local digest, rank, num_ranks, role = ARGV[5], tonumber(ARGV[6]), tonumber(ARGV[7]), ARGV[8]

local TRAINED_MAX = 1024 -- batches whose time is kept for the history

freeing(prefix)
if not owns(sub_key, owner, gen) then return {'owner', 0, ''} end
local s = redis.call('HMGET', sub_key, 'cursor', 'bits', 'cut', 'roles')
local cursor, roles = tonumber(s[1] or 0), s[4] or ''
if not has_role(roles, role) then return {'role', cursor, ''} end
if n > tonumber(s[3] or 0) then return {'unknown', cursor, ''} end
local found = redis.call('XRANGE', batches_key, n .. '-0', n .. '-0')
if #found == 1 and field(found[1][2], 'dg') ~= digest then return {'diverged', cursor, ''} end
if n <= cursor then return {'already', cursor, ''} end
if #found == 0 then return {'unknown', cursor, ''} end
if n ~= cursor + 1 then return {'order', cursor, s[2] or ''} end
local sets = role_bits(s[2])
local set = sets[role] or ''
if #set ~= num_ranks then set = string.rep('0', num_ranks) end
sets[role] = string.sub(set, 1, rank) .. '1' .. string.sub(set, rank + 2)
local all, entries = true, {}
for name in string.gmatch(roles .. ',', '([^,]*),') do
  local of = sets[name] or ''
  if of == '' or string.find(of, '0', 1, true) then all = false end
  entries[#entries + 1] = name .. ':' .. of
end
local bits = table.concat(entries, ',')
if not all then
  redis.call('HSET', sub_key, 'bits', bits)
  return {'waiting', cursor, bits}
end
redis.call('HSET', sub_key, 'bits', '', 'cursor', n)
-- a subscription that does not publish consumes its groups now
if redis.call('HGET', sub_key, 'driving') ~= '1' then
  redis.call('HSET', sub_key, 'p', field(found[1][2], 'cum') or 0)
  poke(prefix .. 'gate')
end
if tonumber(redis.call('HGET', sub_key, 'ask') or 0) > n then event(prefix, 'committed', '', '') end
if keeps_history(prefix) then -- the time, for the groups that are about to be retired
  local trained = prefix .. 'trained:' .. string.sub(sub_key, #(prefix .. 'sub:') + 1)
  redis.call('HSET', trained, n, now_ms())
  redis.call('HDEL', trained, n - TRAINED_MAX)
end
count(prefix, 'batches_committed')
return {'committed', n, bits}
