-- The functions of the Redis store for pauses. They are in one hash by id, each as its end (0: none), a space and JSON.
local function body_of(row)
  local until_ms, body = row:match('^(%d+) (.*)$')
  if until_ms == '0' or tonumber(until_ms) > now then return body end
end

function run.pauses()
  local found = {}
  for _, row in ipairs(redis.call('HVALS', KEYS[1])) do found[#found + 1] = body_of(row) end
  return found
end

function run.pause(id, row, at_most)
  local kept = redis.call('HGETALL', KEYS[1])
  for i = 1, #kept, 2 do
    if not body_of(kept[i + 1]) then redis.call('HDEL', KEYS[1], kept[i]) end
  end
  if redis.call('HLEN', KEYS[1]) - redis.call('HEXISTS', KEYS[1], id) >= tonumber(at_most) then return 0 end
  redis.call('HSET', KEYS[1], id, row)
  return 1
end

function run.resume(id)
  local row = redis.call('HGET', KEYS[1], id)
  redis.call('HDEL', KEYS[1], id)
  return row and body_of(row)
end
