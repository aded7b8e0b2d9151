-- put: - -> written (worker), on a payload server.
-- KEYS: payload:SAMPLE:TOKEN of each sample
-- ARGV: seconds they live unless they are made permanent, then the bytes of each
-- Returns: payloads that were not there before
-- One script because one command costs both sides half of what a pipeline of SETs does (8 of 23 KB). The key carries
-- the lease's token, so saying it twice writes the same bytes, or nothing.
local new = 0
for i = 1, #KEYS do
  if redis.call('SET', KEYS[i], ARGV[i + 1], 'NX', 'EX', ARGV[1]) then new = new + 1 end
end
return new
