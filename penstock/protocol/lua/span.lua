-- span: record the end of the train prompts (producer; the launcher, which withdraws an older producer's record).
-- KEYS: source
-- ARGV: prefix, position at which the data ends ('': it has no end), what happens to a last batch that is short
--       (train | drop)
-- Returns: position of the train prompts; instead -1 if more was admitted already, -2 if it is not a number,
--          and nothing is changed
-- Atomic because the end must not be set before what is admitted meanwhile.
local source_key = KEYS[1]
local prefix, end_position, last_batch = ARGV[1], ARGV[2], ARGV[3]

freeing(prefix)
local position = tonumber(redis.call('HGET', source_key, 'train') or 0)
if not position then return -2 end
if end_position == '' then
  redis.call('HDEL', source_key, 'end', 'last_batch')
  return position
end
if position > tonumber(end_position) then return -1 end
redis.call('HSET', source_key, 'end', end_position, 'last_batch', last_batch)
return position
