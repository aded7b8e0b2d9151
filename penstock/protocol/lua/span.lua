-- span: how far the positions of the train prompts go (producer; the launcher, which takes an older one's word back).
-- KEYS: source
-- ARGV: prefix, position at which the data ends ('': it has no end), what becomes of a last batch that is short
--       (train | drop)
-- Returns: position of the train prompts; -1 in its place where more was admitted already, and nothing is changed
-- Atomic because the end must not come to stand before what is admitted meanwhile.
freeing(ARGV[1])
local position = tonumber(redis.call('HGET', KEYS[1], 'train') or 0)
if ARGV[2] == '' then
  redis.call('HDEL', KEYS[1], 'end', 'last_batch')
  return position
end
if position > tonumber(ARGV[2]) then return -1 end
redis.call('HSET', KEYS[1], 'end', ARGV[2], 'last_batch', ARGV[3])
return position
