-- tidy: what dead processes left behind: records that are old, and consumers without a lease (leader).
-- KEYS: hash of presence or waits, then jobs:LANE
-- ARGV: prefix, then per record: field, record as it was read
-- Returns: records and consumers removed
-- Atomic because a record that was renewed meanwhile stays, and a consumer is deleted with what is pending for it.
freeing(ARGV[1])
local removed = 0
for i = 2, #ARGV, 2 do
  if redis.call('HGET', KEYS[1], ARGV[i]) == ARGV[i + 1] then
    removed = removed + redis.call('HDEL', KEYS[1], ARGV[i])
  end
end
for i = 2, #KEYS do
  for _, consumer in ipairs(redis.call('XINFO', 'CONSUMERS', KEYS[i], GROUP)) do
    local name = field(consumer, 'name')
    if field(consumer, 'pending') == 0 and redis.call('HEXISTS', KEYS[1], name) == 0 then
      redis.call('XGROUP', 'DELCONSUMER', KEYS[i], GROUP, name)
      removed = removed + 1
    end
  end
end
return removed
