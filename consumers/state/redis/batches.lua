-- The functions of the Redis store for providers' batches. For each request a string: whether it was submitted (0 or 1),
-- and its ticket. For each account a hash by ticket: its requests, its tokens, and until when they count.
local function mark(key, submitted, ticket, until_ms)
  redis.call('SET', key, submitted .. ticket, 'PX', math.max(until_ms - now, 1))
end

function run.gather(ticket, until_ms)
  local found = {}
  for i, key in ipairs(KEYS) do
    local row = redis.call('GET', key)
    local is_free = not row or row:sub(1, 1) == '0' or row:sub(2) == ARGV[i + 2]
    if is_free then mark(key, '0', ticket, until_ms) end
    found[i] = is_free and 1 or 0
  end
  return found
end

-- For each request: -1 if it belongs to another ticket, 1 if this one has submitted it before, or none, else 0.
function run.submit(ticket, until_ms)
  local found = {}
  for i, key in ipairs(KEYS) do
    local row = redis.call('GET', key)
    if not row or ticket:sub(1, #row - 1) == row:sub(2) then
      found[i] = (not row or row == '1' .. ticket) and 1 or 0
      mark(key, '1', ticket, until_ms)
    else
      found[i] = -1
    end
  end
  return found
end

function run.clear(ticket, left_ms)
  for _, key in ipairs(KEYS) do
    local row = redis.call('GET', key)
    if row and row:sub(2) == ticket and redis.call('PTTL', key) > tonumber(left_ms) then
      redis.call('PEXPIRE', key, left_ms)
    end
  end
end

function run.enqueue(ticket, requests, tokens, most_requests, most_tokens, until_ms)
  local rows, others, in_all, tokens_in_all = redis.call('HGETALL', KEYS[1]), 0, 0, 0
  local ended = {}
  for i = 1, #rows, 2 do
    local its_requests, its_tokens, its_until_ms = rows[i + 1]:match('^(%d+) (%d+) (%d+)$')
    if tonumber(its_until_ms) <= now then
      ended[#ended + 1] = rows[i]
    elseif rows[i] ~= ticket then
      others, in_all, tokens_in_all = others + 1, in_all + its_requests, tokens_in_all + its_tokens
    end
  end
  for _, each in ipairs(ended) do redis.call('HDEL', KEYS[1], each) end
  local is_above = in_all + requests > tonumber(most_requests)
    or (most_tokens ~= '' and tokens_in_all + tokens > tonumber(most_tokens))
  if others > 0 and is_above then return 0 end
  redis.call('HSET', KEYS[1], ticket, string.format('%d %d %d', requests, tokens, until_ms))
  redis.call('PEXPIRE', KEYS[1], math.max(redis.call('PTTL', KEYS[1]), until_ms - now, 1))
  return 1
end

function run.dequeue(ticket)
  redis.call('HDEL', KEYS[1], ticket)
end
