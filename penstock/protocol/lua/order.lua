-- order: rank 0 gives the next order of a publication to all ranks of its role, and reads which of them have arrived.
-- KEYS: sub:NAME, orders:NAME
-- ARGV: prefix, owner, gen, call (its publications of sharded weights so far), place (of the order in it, from 0), order,
--       ranks, seconds it is kept
-- Returns: {'owner'}, or {'ok', place that rank 1 waits for, ...}; -1 if a rank has not come to this publication
-- Atomic because an order of an older owner or generation must not be followed.
local sub_key, orders_key = KEYS[1], KEYS[2]
local prefix, owner, gen, call, place = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5]
local order, num_ranks, ttl_s = ARGV[6], tonumber(ARGV[7]), ARGV[8]

freeing(prefix)
if not owns(sub_key, owner, gen) then return {'owner'} end
local mark = owner .. ' ' .. call .. ' '
redis.call('HSET', orders_key, 'at', mark .. place, 'o:' .. place, mark .. order)
redis.call('EXPIRE', orders_key, ttl_s)
local places = {'ok'}
for rank = 1, num_ranks - 1 do
  local at = redis.call('HGET', orders_key, 'r:' .. rank) or ''
  local came = string.sub(at, 1, #mark) == mark
  places[#places + 1] = came and tonumber(string.sub(at, #mark + 1)) or -1
end
return places
