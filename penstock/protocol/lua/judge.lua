-- judge: results of a subscription's filters for ready groups: rejected, or kept although a filter raised (leader).
-- KEYS: leader, sub:NAME
-- ARGV: prefix, epoch, token, sub, code of a filtered group (negative), then per group: job, reason,
--       keep it (0|1), a filter raised (0|1), samples, sum of their rewards
-- Returns: number of groups dropped (0 if the subscription was dropped meanwhile), or -1 when the leadership is
--          lost
-- Atomic because a drop frees its place at the gate exactly once, and the ledger agrees with the places freed.
local leader_key, sub_key = KEYS[1], KEYS[2]
local prefix, epoch, token, sub, code = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5]
local first_group = 6

-- The sum is limited on both sides of 0 (MOST_REWARD in position.py): beyond float64 Python cannot read it,
-- and at infinity Redis raises.
local MOST_REWARD = 1e300

local function add_reward(reward)
  local known = tonumber(redis.call('HGET', sub_key, 'rejected_reward') or 0)
  if not known then return end
  local sum = known + tonumber(reward)
  if math.abs(sum) <= MOST_REWARD then
    redis.call('HINCRBYFLOAT', sub_key, 'rejected_reward', reward)
  elseif sum == sum then
    redis.call('HSET', sub_key, 'rejected_reward', string.format('%.0f', sum > 0 and MOST_REWARD or -MOST_REWARD))
  end
end

local dropped = 0
local used = 'u:' .. account_of(sub_key, sub)
freeing(prefix)
if not leads(leader_key, epoch, token) then return -1 end
if redis.call('EXISTS', sub_key) == 0 then return 0 end
for i = first_group, #ARGV, 6 do
  local key, reason, kept = group_key_of(prefix, ARGV[i]), ARGV[i + 1], ARGV[i + 2]
  local raised, samples, reward = ARGV[i + 3], ARGV[i + 4], ARGV[i + 5]
  if redis.call('HGET', key, 'st') == 'ready' then
    if raised == '1' and redis.call('HSETNX', key, 'f:' .. sub, 'raised') == 1 then
      redis.call('HINCRBY', sub_key, 'filter_raised', 1)
    end
    if kept == '0' and redis.call('HSETNX', key, used, code) == 1 then
      redis.call('HINCRBY', sub_key, 'drop:filter/' .. reason, 1)
      redis.call('HSET', key, 'fr:' .. sub, reason)
      redis.call('HINCRBY', sub_key, 'rejected_samples', samples)
      add_reward(reward)
      dropped = dropped + 1
    end
  end
end
if dropped > 0 then
  redis.call('HINCRBY', sub_key, 'disposed', dropped)
  poke(prefix .. 'gate')
end
return dropped
