-- A job in hand: its hash, what is changed of it, its settings, links and history.
-- Fields of glide-mq keep their names; those of our own are short and listed in docs/valkey.md.
--
-- A plain job (default settings, FIFO, no relatives, no past) is most of the traffic and goes through by paths of its own
-- (`admit_plain`, `hand_out_plain`, `complete_plain`). Such a job has `hv` PLAIN and the times of its lease in the one
-- field `ls`; as soon as anybody else writes it here, both are unfolded and it is a job like any other. What these paths
-- cost is above all new Lua strings and arguments of commands: mind them.

local PLAIN = '2'

local adopt, find, get, put, number, run_at, is_ours, word, has_ended, birth, settings, change_setting, links, own_links,
  homes, history, has_history, note, failed_reason, write
do
  local NO_LINKS = {}
  local FOLDED = { 'ls', 'tok', 'own', 'hb', 'len', 'until', 'ser', 'et', 'ef', 'entry' }

  -- `ls` is `<since> <length>`; `!` after the end of the lease, when `own`, `ser` and `entry` mean nothing any more.
  local function unfold(job)
    local h = job.h
    local since, length = string.match(h.ls, '^(%d+) (%d+)$')
    if since then
      h.hb, h.len, h['until'] = since, length, str(tonumber(since) + tonumber(length))
    else
      if h.tok then h.et, h.ef = h.tok, '1' end
      h.tok, h.own, h.ser, h.entry = nil, nil, nil, nil
    end
    h.ls = nil
    job.is_folded = true
  end

  function adopt(queue, id, h)
    local job = { queue = queue, id = id, h = h, w = {} }
    if h.ls then unfold(job) end
    JOBS[queue.p .. ' ' .. id] = job
    return job
  end

  -- The job, or nil. One call sees one object per job, whoever asks for it.
  function find(queue, id)
    local known = JOBS[queue.p .. ' ' .. id]
    if known ~= nil then return known or nil end
    local flat = call('HGETALL', queue.k.job .. id)
    if #flat == 0 then return nil end
    return adopt(queue, id, to_map(flat))
  end

  function get(queue, id, text)
    return find(queue, id) or refuse('not_found', text or 'Job not found')
  end

  function put(job, field, value)
    job.h[field] = value
    if next(job.w) == nil then TOUCHED[#TOUCHED + 1] = job end
    job.w[field] = true
    if job.is_folded then
      job.is_folded = nil
      for _, name in ipairs(FOLDED) do job.w[name] = true end
    end
    if job.h.hv == PLAIN then put(job, 'hv', '1') end
  end

  function number(job, field)
    return tonumber(job.h[field] or '') or 0
  end

  function run_at(job)
    return tonumber(job.h.run or job.h.timestamp) or 0
  end

  function is_ours(job)
    return job.h.hv ~= nil
  end

  function word(job)
    local state = job.h.state
    if state == 'prioritized' or state == 'group-waiting' then return 'waiting' end
    return state
  end

  function has_ended(job)
    return job.h.state == 'completed' or job.h.state == 'failed'
  end

  -- 36 characters that sort by age within a queue.
  function birth(job)
    local text = job.h.birth or job.id
    if #text == 36 then return text end
    return string.sub(string.rep('0', 36 - #text) .. text, 1, 36)
  end

  -- -- settings -----------------------------------------------------------------------------------------------------------

  -- What a job of a Node producer asks for, in our words.
  local function settings_of_opts(job)
    local ok, opts = pcall(cjson.decode, job.h.opts or '{}')
    if not ok or type(opts) ~= 'table' then opts = {} end
    local settings = { maxAttempts = math.max(1, tonumber(opts.attempts) or 1), backoff = 0 }
    if type(opts.backoff) == 'table' then
      settings.backoff = { type = opts.backoff.type or 'fixed', delay = tonumber(opts.backoff.delay) or 0 }
      settings.jitter = tonumber(opts.backoff.jitter) or 0
    end
    settings.timeout = tonumber(opts.timeout)
    settings.removeOnComplete = opts.removeOnComplete
    settings.removeOnFail = opts.removeOnFail
    settings.lockDuration = tonumber(opts.lockDuration)
    for _, policy in ipairs({ 'failParent', 'continueParent', 'ignoreDependency', 'removeDependency' }) do
      settings[policy .. 'OnFailure'] = opts[policy .. 'OnFailure'] == true
    end
    return settings
  end

  local DEFAULTS = { maxAttempts = 3, backoff = 1000, stackTraceLimit = 10 }

  function settings(job)
    if not job.settings then
      if not is_ours(job) then
        job.settings = settings_of_opts(job)
      elseif job.h.hs then
        job.settings = setmetatable(cjson.decode(job.h.hs), { __index = DEFAULTS })
      else
        job.settings = DEFAULTS
      end
    end
    return job.settings
  end

  function change_setting(job, name, value)
    local own = job.h.hs and cjson.decode(job.h.hs) or {}
    own[name] = value
    put(job, 'hs', to_text(own))
    job.settings = nil
  end

  -- -- links and history --------------------------------------------------------------------------------------------------

  function links(job)
    if not job.links then job.links = job.h.hl and cjson.decode(job.h.hl) or NO_LINKS end
    return job.links
  end

  function own_links(job)
    if links(job) == NO_LINKS then job.links = {} end
    job.links_changed = true
    put(job, 'hl', '')
    return job.links
  end

  -- The key prefixes of the queues of children that are in another queue, by id.
  function homes(job, is_changing)
    if not job.homes then job.homes = job.h.ho and cjson.decode(job.h.ho) or {} end
    if is_changing and not job.homes_changed then
      job.homes_changed = true
      put(job, 'ho', '')
    end
    return job.homes
  end

  -- The history, begun now if there was none: from here on the timeline is written down.
  function history(job)
    if not job.history then
      if job.h.hh then
        job.history = cjson.decode(job.h.hh)
      else
        local created = tonumber(job.h.timestamp) or 0
        local first = run_at(job) > created and 'delayed' or 'waiting'
        local timeline = { { state = first, timestamp = created } }
        local started, finished = tonumber(job.h.processedOn), tonumber(job.h.finishedOn) -- Node leaves them empty, too
        if started then timeline[2] = { state = 'active', timestamp = started, worker = job.h.own } end
        if finished then
          timeline[#timeline + 1] = { state = job.h.state == 'failed' and 'failed' or 'completed', timestamp = finished }
        end
        job.history = { timeline = timeline }
      end
    end
    job.history_changed = true
    put(job, 'hh', job.h.hh or '')
    return job.history
  end

  function has_history(job)
    return job.history ~= nil or job.h.hh ~= nil
  end

  function note(job, state, extra)
    local timeline = history(job).timeline
    local entry = extra or {}
    entry.state = state
    entry.timestamp = NOW
    timeline[#timeline + 1] = entry
    if #timeline > MAX_TIMELINE then table.remove(timeline, 2) end
  end

  function failed_reason(job)
    if not has_history(job) then return job.h.failedReason end
    local past = history(job)
    if past.burial and past.burial.error then return past.burial.error end
    for i = #past.timeline, 1, -1 do
      if past.timeline[i].error then return past.timeline[i].error end
    end
  end

  -- -- writing ------------------------------------------------------------------------------------------------------------

  function write(job)
    if job.is_gone then return end
    if job.links_changed then job.h.hl = to_text(job.links) end
    if job.history_changed then job.h.hh = to_text(job.history) end
    if job.homes_changed then job.h.ho = cjson.encode(job.homes) end
    local set, gone = {}, {}
    for field in pairs(job.w) do
      local value = job.h[field]
      if value == nil then
        gone[#gone + 1] = field
      else
        set[#set + 1] = field
        set[#set + 1] = value
      end
    end
    local key = job.queue.p .. ':job:' .. job.id
    if #gone > 0 then call('HDEL', key, unpack(gone)) end
    if #set > 0 then call('HSET', key, unpack(set)) end
    job.w, job.links_changed, job.history_changed, job.homes_changed = {}, nil, nil, nil
  end

  flush = function()
    local i = 1
    while TOUCHED[i] do
      write(TOUCHED[i])
      i = i + 1
    end
  end
end
