-- hear: a rank other than 0 reports for which order of a publication it waits, and reads it (each of them).
-- KEYS: sub:NAME, orders:NAME, owner:NAME
-- ARGV: prefix, owner, call (its publications of sharded weights so far), place of the order, rank, seconds it is kept,
--       most bytes of an order that are returned
-- Returns: {'owner'}, or {'ok', order ('': not given yet), call of rank 0's last order (0: none), 1 while the owner's
--          lease runs}
-- Atomic because a rank of an older owner must not count as arrived.
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
