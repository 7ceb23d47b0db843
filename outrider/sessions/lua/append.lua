-- Appends tokens if the session has the expected length. Follows layout.lua and admit.lua.
-- KEYS: session, tokens, logprobs
-- ARGV: epoch, owner, ttl_ms, expected_length, token bytes, logprobs, '1' if `more_follow`,
--       then field, value, field, value ... to set if the tokens are appended
-- Returns the stored length in tokens, or {'missing', 0}, or {'stale', stored epoch}.
-- If Redis aborts this script at any call, the script has at most raised the epoch (admit.lua), and
-- readers see no change.
local session, refusal = admit(KEYS[1], ARGV[1], ARGV[2])
if not session then return refusal end

local length = length_of(session)
local tokens, logprobs = ARGV[5], ARGV[6]
if length == tonumber(ARGV[4]) and #tokens > 0 then
  local ttl_ms = redis.call('PTTL', KEYS[1])
  if ttl_ms < 1 then ttl_ms = ARGV[3] end
  -- While all tokens are sent again, readers see the old tokens until the last part is stored.
  local is_part = session.rewrite and ARGV[7] == '1'
  local prefix = is_part and 'pending_' or ''
  local counted = session
  if session.rewrite then counted = session.pending end
  local ends = {'rewrite', is_part and '1' or '0'}
  for i, new in ipairs({{'tokens', tokens}, {'logprobs', logprobs}}) do
    local name, bytes = new[1], new[2]
    local start, stop
    if counted then
      start, stop = extent(KEYS[1 + i], counted[name .. '_start'], counted[name .. '_end'])
    else
      start = redis.call('STRLEN', KEYS[1 + i])  -- The new bytes follow all stored bytes.
      stop = start
    end
    if #bytes > 0 then put(KEYS[1 + i], stop, bytes, ttl_ms) end
    for _, value in ipairs({prefix .. name .. '_start', start,
        prefix .. name .. '_end', stop + #bytes}) do
      ends[#ends + 1] = value
    end
  end
  if not is_part then
    for i = 8, #ARGV do ends[#ends + 1] = ARGV[i] end
  end
  redis.call('HSET', KEYS[1], unpack(ends))
  length = length + #tokens / 4
end

if session.state == 'running' then prolong(ARGV[3]) end
return length
