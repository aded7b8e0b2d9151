-- judge: what a subscription's filters said of ready groups: rejected, or kept although a filter raised (leader).
-- KEYS: leader, sub:NAME
-- ARGV: prefix, epoch, token, sub, code of a filtered group (negative), then per group: job, reason,
--       keep it (0|1), a filter raised (0|1), samples, sum of their rewards
-- Returns: number of groups dropped, or -1 when the leadership is lost
-- Atomic because a drop frees its place at the gate exactly once, and the ledger agrees with the places freed.
local prefix, sub, dropped = ARGV[1], ARGV[4], 0
local used = 'u:' .. account_of(KEYS[2], sub)
freeing(prefix)
if not leads(KEYS[1], ARGV[2], ARGV[3]) then return -1 end
for i = 6, #ARGV, 6 do
  local key = group_key(prefix, ARGV[i])
  if redis.call('HGET', key, 'st') == 'ready' then
    if ARGV[i + 3] == '1' and redis.call('HSETNX', key, 'f:' .. sub, 'raised') == 1 then
      redis.call('HINCRBY', KEYS[2], 'filter_raised', 1)
    end
    if ARGV[i + 2] == '0' and redis.call('HSETNX', key, used, ARGV[5]) == 1 then
      redis.call('HINCRBY', KEYS[2], 'drop:filter/' .. ARGV[i + 1], 1)
      redis.call('HINCRBY', KEYS[2], 'rejected_samples', ARGV[i + 4])
      redis.call('HINCRBYFLOAT', KEYS[2], 'rejected_reward', ARGV[i + 5])
      dropped = dropped + 1
    end
  end
end
if dropped > 0 then
  redis.call('HINCRBY', KEYS[2], 'disposed', dropped)
  poke(prefix .. 'gate')
end
return dropped
