-- Prepended to every script of sessions. KEYS: session, tokens, logprobs.
--
-- The hash names the bytes of the two strings that are the session's: tokens_start .. tokens_end and
-- logprobs_start .. logprobs_end (offsets; the end is excluded). A script first writes bytes behind
-- the ends, where no reader looks, and then changes the hash by one HSET: that call commits, with all
-- other fields. So a script that Redis ends at any call (memory full, disk full, too few replicas,
-- rights withdrawn) has changed nothing that is read, or all. Times to live are set last; one that is
-- missing or too short is set by the next write.

-- Where a string's bytes begin and end: no further than the string goes, though a damaged one may be
-- shorter than the hash says.
local function extent(key, start, stop)
  local size = redis.call('STRLEN', key)
  stop = math.min(tonumber(stop), size)
  return math.min(tonumber(start), stop), stop
end

-- Writes bytes at an offset that is within the string or at its end. A new string expires at once.
local function put(key, at, bytes, ttl_ms)
  if at == 0 then
    redis.call('SET', key, bytes, 'PX', ttl_ms)
  else
    redis.call('SETRANGE', key, at, bytes)
  end
end

-- Gives the session its least time to live. It is written a sixtieth too long, so that it need not be
-- written again with each append.
local function prolong(ttl_ms)
  if redis.call('PTTL', KEYS[1]) < tonumber(ttl_ms) then
    local longer_ms = string.format('%.0f', ttl_ms * 61 / 60)
    for _, key in ipairs(KEYS) do redis.call('PEXPIRE', key, longer_ms) end
  end
end

-- Returns {fields and values, {first byte, end} of the tokens, the same of the log-probabilities}: see
-- read_part.lua.
local function read()
  local ends = redis.call('HMGET', KEYS[1], 'tokens_start', 'tokens_end', 'logprobs_start',
    'logprobs_end')
  local found = {redis.call('HGETALL', KEYS[1])}
  for i = 2, 3 do found[i] = {extent(KEYS[i], ends[2 * i - 3], ends[2 * i - 2])} end
  return found
end
