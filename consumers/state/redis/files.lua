-- The functions of the Redis store for the files that lie at providers. Each is a string of JSON by its id, which expires
-- with the file; and a field of its tenant's hash, which is removed when the tenant's files are read after that.
function run.keep_file(id, row, most, until_ms, tenant)
  local found = redis.call('GET', KEYS[1])
  if found then return cjson.decode(found).tenant == tenant and 1 or 0 end
  if redis.call('HLEN', KEYS[2]) >= tonumber(most) then return 0 end
  redis.call('SET', KEYS[1], row)
  if until_ms ~= '' then redis.call('PEXPIREAT', KEYS[1], until_ms) end
  redis.call('HSET', KEYS[2], id, row)
  return 1
end

function run.find_files() return redis.call('MGET', unpack(KEYS)) end

function run.files()
  local rows, found, ended = redis.call('HGETALL', KEYS[1]), {}, {}
  for i = 1, #rows, 2 do
    local until_ms = cjson.decode(rows[i + 1]).until_ms
    if type(until_ms) == 'number' and until_ms <= now then
      ended[#ended + 1] = rows[i]
    else
      found[#found + 1] = rows[i + 1]
    end
  end
  for _, id in ipairs(ended) do redis.call('HDEL', KEYS[1], id) end
  return found
end

function run.forget_file(id)
  if redis.call('HDEL', KEYS[2], id) == 1 then redis.call('DEL', KEYS[1]) end
end
