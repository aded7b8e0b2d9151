-- tidy: delete what dead processes left: old records, and consumers without a lease (leader).
-- KEYS: hash of presence or waits, then jobs:LANE
-- ARGV: prefix, then per record: field, record as it was read
-- Returns: records and consumers removed
-- Atomic because a record that was renewed meanwhile stays, and a consumer is deleted only without pending entries.
local records_key = KEYS[1]
local first_lane_key = 2
local prefix = ARGV[1]
local first_record = 2

freeing(prefix)
local removed = 0
for i = first_record, #ARGV, 2 do
  local name, record = ARGV[i], ARGV[i + 1]
  if redis.call('HGET', records_key, name) == record then
    removed = removed + redis.call('HDEL', records_key, name)
  end
end
for i = first_lane_key, #KEYS do
  for _, consumer in ipairs(redis.call('XINFO', 'CONSUMERS', KEYS[i], GROUP)) do
    local name = field(consumer, 'name')
    if field(consumer, 'pending') == 0 and redis.call('HEXISTS', records_key, name) == 0 then
      redis.call('XGROUP', 'DELCONSUMER', KEYS[i], GROUP, name)
      removed = removed + 1
    end
  end
end
return removed
