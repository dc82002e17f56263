"""The whole schema: jobs, messages, timers, askings, ports, packets, state, aliases, workers, the dead set, the broker.

What a run changes carries neither an index nor a foreign key, not even in an index's WHERE, so that updates of `jobs`
stay HOT; illegal rows are impossible by the CHECKs (the rules are those of the protocol's model). The same holds for
who has a message of the broker: no index contains its holder, not even in its WHERE.

Until the first release a change of the schema is made here. After it this file stays as it is.

Revision ID: 0001
Revises:
"""

from __future__ import annotations

from alembic import context, op
from sqlalchemy import text

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

DDL = """
CREATE TABLE {s}.meta (
  key text CONSTRAINT meta_pkey PRIMARY KEY,
  value text NOT NULL);

CREATE TABLE {s}.registry (
  task text NOT NULL,
  queue text NOT NULL,
  options json NOT NULL,
  seen_at timestamptz NOT NULL DEFAULT now(),
  CONSTRAINT registry_pkey PRIMARY KEY (task, queue));

CREATE TABLE {s}.workers (
  id bigint GENERATED ALWAYS AS IDENTITY CONSTRAINT workers_pkey PRIMARY KEY,
  ident text NOT NULL CONSTRAINT workers_ident_key UNIQUE,
  revision text NOT NULL,
  broker text,
  locked boolean NOT NULL DEFAULT false,
  started_at timestamptz NOT NULL DEFAULT now(),
  beat_at timestamptz NOT NULL DEFAULT now(),
  suspect_at timestamptz,
  suspect_by text,
  dead_at timestamptz,
  CONSTRAINT workers_suspect_check CHECK ((suspect_at IS NULL) = (suspect_by IS NULL)),
  CONSTRAINT workers_suspect_by_check CHECK (suspect_by IN ('lock', 'silence'))
) WITH (fillfactor = 50);

CREATE TABLE {s}.served (
  worker_id bigint CONSTRAINT served_pkey PRIMARY KEY
    CONSTRAINT served_worker_id_fkey REFERENCES {s}.workers ON DELETE CASCADE,
  queues text[] NOT NULL,
  tasks text[] NOT NULL,
  skew_s double precision NOT NULL,
  stood_at timestamptz,
  stood text,
  CONSTRAINT served_stood_check CHECK ((stood IS NULL) = (stood_at IS NULL)));

CREATE TABLE {s}.counters (
  name text NOT NULL,
  label text NOT NULL DEFAULT '',
  value double precision NOT NULL,
  CONSTRAINT counters_pkey PRIMARY KEY (name, label)
) WITH (fillfactor = 50);

CREATE TABLE {s}.tallies (
  day date,
  queue text,
  task text,
  step text,
  measure text,
  bucket smallint,
  number bigint NOT NULL,
  total_us numeric NOT NULL,
  squares_us numeric NOT NULL,
  CONSTRAINT tallies_pkey PRIMARY KEY (day, queue, task, step, measure, bucket)
) WITH (fillfactor = 50);

CREATE TABLE {s}.run_samples (
  taken_at timestamptz CONSTRAINT run_samples_pkey PRIMARY KEY,
  runs bigint NOT NULL,
  failures bigint NOT NULL);

CREATE TABLE {s}.leases (
  name text CONSTRAINT leases_pkey PRIMARY KEY,
  holder bigint,
  expires_at timestamptz NOT NULL DEFAULT now()
) WITH (fillfactor = 50);
INSERT INTO {s}.leases (name) VALUES ('sweeper');

CREATE TABLE {s}.queues (
  name text CONSTRAINT queues_pkey PRIMARY KEY,
  ranked boolean NOT NULL DEFAULT false,
  ordered boolean NOT NULL DEFAULT false,
  run_limit int,
  key_limit int,
  rate_interval_s double precision,
  rate_burst int,
  rate_opens_at timestamptz,
  paused_at timestamptz,
  pause_reason text,
  declared json,
  CONSTRAINT queues_limits_check CHECK (run_limit > 0 AND key_limit > 0),
  CONSTRAINT queues_rate_check
    CHECK ((rate_interval_s IS NULL) = (rate_burst IS NULL) AND rate_interval_s > 0 AND rate_burst > 0),
  CONSTRAINT queues_pause_check CHECK (paused_at IS NOT NULL OR pause_reason IS NULL)
) WITH (fillfactor = 50);

CREATE TABLE {s}.limit_keys (
  queue text NOT NULL,
  key text NOT NULL,
  served_at timestamptz NOT NULL,
  CONSTRAINT limit_keys_pkey PRIMARY KEY (queue, key)
) WITH (fillfactor = 50);
CREATE INDEX limit_keys_served_at_idx ON {s}.limit_keys (served_at);

CREATE TABLE {s}.capacity_pools (
  name text CONSTRAINT capacity_pools_pkey PRIMARY KEY,
  capacity int NOT NULL,
  declared int NOT NULL,
  shards smallint NOT NULL,
  covers text NOT NULL DEFAULT 'queued',
  refused bigint NOT NULL DEFAULT 0,
  sampled bigint NOT NULL DEFAULT 0,
  created_at timestamptz NOT NULL DEFAULT now(),
  CONSTRAINT capacity_pools_capacity_check CHECK (capacity >= shards AND shards > 0),
  CONSTRAINT capacity_pools_covers_check CHECK (covers IN ('queued', 'running'))
) WITH (fillfactor = 50);

CREATE TABLE {s}.capacity_shards (
  pool text NOT NULL CONSTRAINT capacity_shards_pool_fkey REFERENCES {s}.capacity_pools ON DELETE CASCADE,
  shard smallint NOT NULL,
  capacity int NOT NULL,
  used bigint NOT NULL DEFAULT 0,
  admitted bigint NOT NULL DEFAULT 0,
  freed bigint NOT NULL DEFAULT 0,
  CONSTRAINT capacity_shards_pkey PRIMARY KEY (pool, shard),
  CONSTRAINT capacity_shards_used_check CHECK (used >= 0 AND capacity > 0)
) WITH (fillfactor = 10, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 1000);

CREATE TABLE {s}.capacity_samples (
  pool text NOT NULL CONSTRAINT capacity_samples_pool_fkey REFERENCES {s}.capacity_pools ON DELETE CASCADE,
  taken_at timestamptz NOT NULL,
  admitted bigint NOT NULL,
  freed bigint NOT NULL,
  refused bigint NOT NULL,
  CONSTRAINT capacity_samples_pkey PRIMARY KEY (pool, taken_at));

CREATE TABLE {s}.schedules (
  name text CONSTRAINT schedules_pkey PRIMARY KEY,
  task text NOT NULL,
  args json NOT NULL,
  kwargs json NOT NULL,
  options json NOT NULL,
  every_s double precision,
  cron text,
  timezone text,
  start_at timestamptz,
  end_at timestamptz,
  catch_up int,
  overlap text NOT NULL,
  jitter_s double precision NOT NULL,
  declared json,
  anchor_at timestamptz NOT NULL,
  plan json NOT NULL,
  next_at timestamptz,
  due_at timestamptz,
  revision bigint NOT NULL DEFAULT 1,
  count bigint NOT NULL DEFAULT 0,
  last_at timestamptz,
  last_job_id bigint,
  last_task_id text,
  paused_at timestamptz,
  pause_reason text,
  trouble text,
  CONSTRAINT schedules_timing_check CHECK ((every_s > 0 AND cron IS NULL AND timezone IS NULL)
    OR (every_s IS NULL AND cron IS NOT NULL AND timezone IS NOT NULL)),
  CONSTRAINT schedules_rules_check CHECK (catch_up > 0 AND overlap IN ('allow', 'skip', 'wait') AND jitter_s >= 0),
  CONSTRAINT schedules_due_check
    CHECK ((due_at IS NULL) = (next_at IS NULL OR paused_at IS NOT NULL) AND (due_at >= next_at) IS NOT FALSE),
  CONSTRAINT schedules_last_check
    CHECK ((last_at IS NULL) = (count = 0) AND (last_task_id IS NULL) = (count = 0) AND count >= 0),
  CONSTRAINT schedules_pause_check CHECK (paused_at IS NOT NULL OR pause_reason IS NULL)
) WITH (fillfactor = 50);
CREATE INDEX schedules_due_at_idx ON {s}.schedules (due_at) WHERE due_at IS NOT NULL;

CREATE TABLE {s}.jobs (
  id bigint GENERATED BY DEFAULT AS IDENTITY CONSTRAINT jobs_pkey PRIMARY KEY,
  task text NOT NULL,
  queue text NOT NULL,
  priority smallint,
  args json NOT NULL DEFAULT '[]',
  kwargs json NOT NULL DEFAULT '{{}}',
  parent_id bigint CONSTRAINT jobs_parent_id_fkey REFERENCES {s}.jobs,
  name text,
  created_by text,
  schedule text,
  schedule_no bigint,
  nominal_at timestamptz,
  created_at timestamptz NOT NULL DEFAULT now(),
  status text NOT NULL DEFAULT 'queued',
  run_no bigint NOT NULL DEFAULT 0,
  unit_no int,
  worker_id bigint,
  run_kind text,
  ended_run bigint,
  wakes bigint NOT NULL DEFAULT 0,
  wakes_taken bigint NOT NULL DEFAULT 0,
  changes bigint NOT NULL DEFAULT 0,
  timer_in_run boolean NOT NULL DEFAULT false,
  terminate_tree boolean NOT NULL DEFAULT false,
  losses int NOT NULL DEFAULT 0,
  max_losses int,
  retention_s double precision,
  retention_keep bigint,
  rate_interval_s double precision,
  rate_burst int,
  rate_terminates boolean,
  rate_opens_at timestamptz,
  limit_key text,
  pool text,
  pool_weight smallint,
  pool_runs boolean,
  retries int NOT NULL DEFAULT 0,
  started boolean NOT NULL DEFAULT false,
  ran_at timestamptz,
  ended_at timestamptz,
  error json,
  inputs_memo json,
  blocked boolean,
  has_dependents boolean,
  has_steps boolean,
  failed_by bigint,
  CONSTRAINT jobs_parent_id_name_key UNIQUE (parent_id, name),
  CONSTRAINT jobs_status_check CHECK (status IN ({statuses})),
  CONSTRAINT jobs_in_run_check
    CHECK ((unit_no IS NULL) = (worker_id IS NULL) AND (unit_no IS NULL) = (run_kind IS NULL)),
  CONSTRAINT jobs_run_kind_check CHECK (run_kind IN ('run', 'shutdown')),
  CONSTRAINT jobs_unit_no_check CHECK (unit_no IS NULL OR (unit_no >= 0 AND run_no > 0)),
  CONSTRAINT jobs_in_run_status_check CHECK (unit_no IS NULL OR status IN ('running', 'queued', 'terminating')),
  CONSTRAINT jobs_running_check CHECK (status <> 'running' OR unit_no IS NOT NULL),
  CONSTRAINT jobs_shutdown_check CHECK (run_kind IS DISTINCT FROM 'shutdown' OR status = 'terminating'),
  CONSTRAINT jobs_wakes_check CHECK (wakes_taken <= wakes),
  CONSTRAINT jobs_no_parked_wake_check CHECK (wakes = wakes_taken OR status IN ('queued', 'terminating')),
  CONSTRAINT jobs_queued_in_run_check CHECK (unit_no IS NULL OR status <> 'queued' OR wakes > wakes_taken),
  CONSTRAINT jobs_child_name_check CHECK ((parent_id IS NULL) = (name IS NULL)),
  CONSTRAINT jobs_own_parent_check CHECK (parent_id <> id),
  CONSTRAINT jobs_schedule_check
    CHECK ((schedule IS NULL) = (schedule_no IS NULL) AND (schedule IS NULL) = (nominal_at IS NULL)),
  CONSTRAINT jobs_rate_check CHECK ((rate_interval_s IS NULL) = (rate_burst IS NULL)
    AND (rate_interval_s IS NULL) = (rate_terminates IS NULL) AND rate_interval_s > 0 AND rate_burst > 0),
  CONSTRAINT jobs_pool_check CHECK ((pool IS NULL) = (pool_weight IS NULL) AND pool_weight > 0)
) WITH (fillfactor = 85, autovacuum_vacuum_scale_factor = 0.05);
CREATE INDEX jobs_created_at_idx ON {s}.jobs (created_at);

CREATE TABLE {s}.messages (
  task_id text CONSTRAINT messages_pkey PRIMARY KEY,
  job_id bigint CONSTRAINT messages_job_id_key UNIQUE
    CONSTRAINT messages_job_id_fkey REFERENCES {s}.jobs ON DELETE CASCADE,
  for_run bigint,
  task text,
  queue text NOT NULL,
  publication text,
  body bytea,
  generation int,
  due_at timestamptz NOT NULL DEFAULT now(),
  gate smallint NOT NULL DEFAULT {open},
  expires_at timestamptz,
  next_check_at timestamptz NOT NULL DEFAULT now(),
  check_interval interval NOT NULL,
  published_at timestamptz,
  suspected_at timestamptz,
  declined_at timestamptz,
  locked_by bigint,
  locked_at timestamptz,
  locked_pid int,
  on_lost text,
  max_losses int,
  losses int NOT NULL DEFAULT 0,
  last_loss json,
  doom text,
  priority smallint,
  unique_key text,
  rank smallint,
  limit_key text,
  pool text,
  pool_weight smallint,
  pool_rank smallint,
  pool_runs boolean,
  pool_shard smallint,
  CONSTRAINT messages_job_check
    CHECK ((job_id IS NULL) = (for_run IS NULL) AND (job_id IS NULL) = (publication IS NOT NULL)),
  CONSTRAINT messages_body_check
    CHECK ((body IS NULL) = (task IS NULL) AND (body IS NULL) = (generation IS NULL)
      AND (body IS NULL OR publication IS NOT NULL)),
  CONSTRAINT messages_lock_check CHECK ((locked_by IS NULL) = (locked_at IS NULL)),
  CONSTRAINT messages_suspected_check CHECK (locked_by IS NULL OR suspected_at IS NULL),
  CONSTRAINT messages_on_lost_check CHECK (on_lost IN ('requeue', 'dead')),
  CONSTRAINT messages_doom_check CHECK (doom IS NULL OR (body IS NOT NULL
    AND (doom = 'revoked' OR (doom IN ('lost', 'expired') AND locked_by IS NULL)))),
  CONSTRAINT messages_gate_check CHECK (gate = {open}
    OR gate IN ({queue}, {pool}, {worker}, {jobs}) AND locked_by IS NULL AND published_at IS NULL),
  CONSTRAINT messages_pool_check CHECK ((pool IS NULL) = (pool_weight IS NULL) AND (pool IS NULL) = (pool_rank IS NULL)
    AND pool_weight > 0 AND (pool_shard IS NULL OR pool IS NOT NULL))
) WITH (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 2000);
CREATE INDEX messages_queue_next_check_at_idx ON {s}.messages (queue, next_check_at);
CREATE INDEX messages_declined_idx ON {s}.messages (task, queue, declined_at)
  WHERE gate = {worker} OR declined_at IS NOT NULL;
CREATE INDEX messages_locked_by_idx ON {s}.messages (locked_by) WHERE locked_by IS NOT NULL;
CREATE INDEX messages_rank_idx ON {s}.messages (queue, rank DESC, due_at, job_id)
  WHERE rank IS NOT NULL AND locked_by IS NULL AND gate <= {queue};
CREATE INDEX messages_limit_key_idx ON {s}.messages (queue, limit_key, rank DESC, due_at, job_id)
  WHERE rank IS NOT NULL AND locked_by IS NULL AND gate <= {queue};
CREATE UNIQUE INDEX messages_unique_key_idx ON {s}.messages (unique_key)
  WHERE unique_key IS NOT NULL AND (doom IS NULL OR locked_by IS NOT NULL);
CREATE INDEX messages_pool_idx ON {s}.messages (pool) WHERE pool_shard IS NOT NULL;
CREATE INDEX messages_pool_waiting_idx ON {s}.messages (pool, pool_rank DESC, due_at, job_id) WHERE gate = {pool};
CREATE INDEX messages_at_gate_idx ON {s}.messages (queue, due_at) WHERE gate = {queue};

CREATE FUNCTION {s}.fill_pool(filled text) RETURNS void LANGUAGE plpgsql
  SET search_path = pg_catalog, pg_temp AS $$
DECLARE first_in text; weight smallint; taken smallint; BEGIN LOOP
  SELECT m.task_id, m.pool_weight INTO first_in, weight FROM {s}.messages m
  WHERE m.pool = filled AND m.gate = {pool} AND m.due_at <= now() AND m.doom IS NULL
  ORDER BY m.pool_rank DESC, m.due_at, m.job_id LIMIT 1 FOR UPDATE SKIP LOCKED
  ; EXIT WHEN NOT FOUND
  ; UPDATE {s}.capacity_shards c SET used = c.used + weight, admitted = c.admitted + 1
  WHERE c.pool = filled AND c.shard = (
    SELECT r.shard FROM {s}.capacity_shards r
    WHERE r.pool = filled AND (r.used + weight <= r.capacity OR r.used = 0 AND weight > r.capacity)
    ORDER BY r.used - r.capacity, r.shard LIMIT 1 FOR UPDATE SKIP LOCKED)
  RETURNING c.shard INTO taken
  ; EXIT WHEN NOT FOUND
  ; UPDATE {s}.messages m SET pool_shard = taken, gate = {open}, next_check_at = now(), suspected_at = NULL
  WHERE m.task_id = first_in
  ; END LOOP; END $$;
CREATE FUNCTION {s}.enter_pool() RETURNS trigger LANGUAGE plpgsql
  SET search_path = pg_catalog, pg_temp AS $$ DECLARE taken smallint; BEGIN
  IF NEW.pool_shard IS NULL AND current_setting('transaction_isolation') <> 'read committed' THEN RETURN NULL
  ; END IF
  ; PERFORM FROM {s}.capacity_shards c WHERE c.pool IN (NEW.pool, OLD.pool) ORDER BY c.pool, c.shard FOR UPDATE
  ; IF NEW.pool_shard IS NOT NULL THEN
    SELECT c.shard INTO taken FROM {s}.capacity_shards c WHERE c.pool = NEW.pool ORDER BY c.used - c.capacity, c.shard
    LIMIT 1
  ; UPDATE {s}.messages m SET pool_shard = taken WHERE m.task_id = NEW.task_id AND m.pool_shard < 0
  ; IF FOUND THEN
    UPDATE {s}.capacity_shards c SET used = c.used + NEW.pool_weight, admitted = c.admitted + 1
    WHERE c.pool = NEW.pool AND c.shard = taken
  ; END IF
  ; ELSIF EXISTS (SELECT FROM {s}.capacity_shards c WHERE c.pool = NEW.pool) THEN
    PERFORM {s}.fill_pool(NEW.pool)
  ; ELSE UPDATE {s}.messages m SET gate = {open}, next_check_at = now()
    WHERE m.task_id = NEW.task_id AND m.gate = {pool}
  ; END IF; RETURN NULL; END $$;
CREATE FUNCTION {s}.leave_pool() RETURNS trigger LANGUAGE plpgsql
  SET search_path = pg_catalog, pg_temp AS $$ BEGIN
  UPDATE {s}.capacity_shards SET used = used - OLD.pool_weight, freed = freed + 1
  WHERE pool = OLD.pool AND shard = OLD.pool_shard
  ; PERFORM {s}.fill_pool(OLD.pool); RETURN NULL; END $$;
CREATE FUNCTION {s}.pause_in_pool() RETURNS trigger LANGUAGE plpgsql
  SET search_path = pg_catalog, pg_temp AS $$ BEGIN NEW.pool_shard = NULL
  ; IF NEW.body IS NOT NULL AND NEW.doom IS NULL THEN NEW.gate = {pool}
  ; NEW.next_check_at = 'infinity'; NEW.published_at = NULL
  ; END IF; RETURN NEW; END $$;
CREATE TRIGGER messages_pause_in_pool BEFORE UPDATE ON {s}.messages FOR EACH ROW
  WHEN (NEW.pool_runs AND OLD.locked_by IS NOT NULL AND NEW.locked_by IS NULL AND NEW.pool_shard IS NOT NULL)
  EXECUTE FUNCTION {s}.pause_in_pool();
CREATE CONSTRAINT TRIGGER messages_enter_pool AFTER INSERT OR UPDATE OF gate ON {s}.messages
  DEFERRABLE INITIALLY DEFERRED FOR EACH ROW WHEN (NEW.pool_shard < 0 OR NEW.gate = {pool})
  EXECUTE FUNCTION {s}.enter_pool();
CREATE CONSTRAINT TRIGGER messages_rest_in_pool AFTER UPDATE ON {s}.messages DEFERRABLE INITIALLY DEFERRED
  FOR EACH ROW WHEN (OLD.pool_shard IS NOT NULL AND NEW.pool_shard IS NULL) EXECUTE FUNCTION {s}.leave_pool();
CREATE CONSTRAINT TRIGGER messages_leave_pool AFTER DELETE ON {s}.messages DEFERRABLE INITIALLY DEFERRED
  FOR EACH ROW WHEN (OLD.pool_shard IS NOT NULL) EXECUTE FUNCTION {s}.leave_pool();

CREATE TABLE {s}.duplicates (
  task_id text NOT NULL,
  call text NOT NULL,
  tried text[] NOT NULL,
  kept_until timestamptz NOT NULL,
  CONSTRAINT duplicates_pkey PRIMARY KEY (task_id, call)
) WITH (autovacuum_vacuum_scale_factor = 0.05);
CREATE INDEX duplicates_kept_until_idx ON {s}.duplicates (kept_until);

CREATE TABLE {s}.timers (
  id bigint GENERATED ALWAYS AS IDENTITY CONSTRAINT timers_pkey PRIMARY KEY,
  job_id bigint NOT NULL CONSTRAINT timers_job_id_fkey REFERENCES {s}.jobs ON DELETE CASCADE,
  due_at timestamptz NOT NULL,
  ask text NOT NULL,
  accepted boolean NOT NULL,
  CONSTRAINT timers_ask_check CHECK (ask IN ('run', 'look', 'force', 'timeout', 'terminate', 'terminate_tree'))
) WITH (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 2000);
CREATE INDEX timers_job_id_idx ON {s}.timers (job_id);
CREATE INDEX timers_due_at_idx ON {s}.timers (due_at);
CREATE INDEX timers_noted_idx ON {s}.timers (id) WHERE NOT accepted;

CREATE TABLE {s}.dependencies (
  job_id bigint NOT NULL CONSTRAINT dependencies_job_id_fkey REFERENCES {s}.jobs ON DELETE CASCADE,
  depends_on bigint NOT NULL,
  on_failure text NOT NULL,
  state text NOT NULL DEFAULT 'new',
  CONSTRAINT dependencies_pkey PRIMARY KEY (job_id, depends_on),
  CONSTRAINT dependencies_on_failure_check CHECK (on_failure IN ('wait', 'fail', 'run')),
  CONSTRAINT dependencies_state_check CHECK (state IN ('new', 'kept', 'over', 'failed'))
) WITH (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 2000);
CREATE INDEX dependencies_depends_on_idx ON {s}.dependencies (depends_on, job_id);
CREATE INDEX dependencies_noted_idx ON {s}.dependencies (job_id) WHERE state <> 'kept';

CREATE TABLE {s}.batches (
  id bigint GENERATED ALWAYS AS IDENTITY CONSTRAINT batches_pkey PRIMARY KEY,
  name text NOT NULL CONSTRAINT batches_name_key UNIQUE DEFERRABLE,
  calls json NOT NULL,
  created_at timestamptz NOT NULL DEFAULT now(),
  closed_at timestamptz,
  ended_at timestamptz,
  CONSTRAINT batches_ended_check CHECK (ended_at IS NULL OR closed_at IS NOT NULL));
CREATE INDEX batches_unended_idx ON {s}.batches (id) WHERE ended_at IS NULL;

CREATE TABLE {s}.batch_members (
  id bigint GENERATED ALWAYS AS IDENTITY CONSTRAINT batch_members_pkey PRIMARY KEY,
  batch_id bigint NOT NULL CONSTRAINT batch_members_batch_id_fkey REFERENCES {s}.batches ON DELETE CASCADE,
  job_id bigint,
  task_id text,
  outcome text,
  CONSTRAINT batch_members_job_id_key UNIQUE (batch_id, job_id),
  CONSTRAINT batch_members_task_id_key UNIQUE (batch_id, task_id),
  CONSTRAINT batch_members_what_check CHECK ((job_id IS NULL) <> (task_id IS NULL)),
  CONSTRAINT batch_members_outcome_check CHECK (outcome IN ('completed', 'failed', 'terminated')));
CREATE INDEX batch_members_open_idx ON {s}.batch_members (batch_id, id) WHERE outcome IS NULL;
CREATE INDEX batch_members_failed_idx ON {s}.batch_members (batch_id, id) WHERE outcome <> 'completed';

CREATE TABLE {s}.progress (
  job_id bigint CONSTRAINT progress_pkey PRIMARY KEY,
  run_no bigint NOT NULL,
  told_at timestamptz NOT NULL DEFAULT now(),
  done double precision,
  total double precision,
  note text
) WITH (fillfactor = 50);

CREATE TABLE {s}.tree_terminations (
  job_id bigint CONSTRAINT tree_terminations_pkey PRIMARY KEY,
  root bigint NOT NULL,
  itself boolean NOT NULL,
  after text NOT NULL DEFAULT '',
  CONSTRAINT tree_terminations_after_check CHECK (after = '' OR NOT itself)
) WITH (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 1000);

CREATE TABLE {s}.tree_deletions (
  job_id bigint CONSTRAINT tree_deletions_pkey PRIMARY KEY);

CREATE TABLE {s}.askings (
  task_id text CONSTRAINT askings_pkey PRIMARY KEY,
  job_id bigint NOT NULL CONSTRAINT askings_job_id_fkey REFERENCES {s}.jobs ON DELETE CASCADE,
  options json,
  unique_key text,
  opened_at timestamptz NOT NULL DEFAULT now(),
  closed_at timestamptz,
  outcome text,
  result json,
  stored_at timestamptz,
  CONSTRAINT askings_outcome_check CHECK (outcome IN ('completed', 'failed', 'terminated')),
  CONSTRAINT askings_closed_check
    CHECK ((closed_at IS NULL) = (outcome IS NULL) AND (stored_at IS NULL OR closed_at IS NOT NULL))
) WITH (autovacuum_vacuum_scale_factor = 0.05);
CREATE INDEX askings_job_id_idx ON {s}.askings (job_id);
CREATE UNIQUE INDEX askings_open_idx ON {s}.askings (job_id) WHERE closed_at IS NULL;
CREATE UNIQUE INDEX askings_unique_key_idx ON {s}.askings (unique_key)
  WHERE closed_at IS NULL AND unique_key IS NOT NULL;
CREATE INDEX askings_unsent_idx ON {s}.askings (closed_at) WHERE closed_at IS NOT NULL AND stored_at IS NULL;

CREATE TABLE {s}.dead (
  id bigint GENERATED ALWAYS AS IDENTITY CONSTRAINT dead_pkey PRIMARY KEY,
  job_id bigint CONSTRAINT dead_job_id_fkey REFERENCES {s}.jobs ON DELETE CASCADE,
  task_id text,
  task text NOT NULL,
  queue text NOT NULL,
  reason text NOT NULL,
  error text,
  traceback text,
  retries int NOT NULL DEFAULT 0,
  died_at timestamptz NOT NULL DEFAULT now(),
  payload json NOT NULL,
  body bytea,
  given_group text,
  failure_group text NOT NULL
    GENERATED ALWAYS AS (coalesce(given_group, left(split_part(coalesce(error, ''), ':', 1), 255))) STORED,
  CONSTRAINT dead_reason_check
    CHECK (reason IN ('failed', 'lost', 'revoked', 'expired', 'unsendable', 'shutdown lost')));
CREATE INDEX dead_job_id_idx ON {s}.dead (job_id);
CREATE INDEX dead_task_id_idx ON {s}.dead (task_id);
CREATE INDEX dead_task_idx ON {s}.dead (task, id);
CREATE INDEX dead_failure_group_idx ON {s}.dead (failure_group, id);

CREATE TABLE {s}.ports (
  id bigint GENERATED ALWAYS AS IDENTITY CONSTRAINT ports_pkey PRIMARY KEY,
  job_id bigint NOT NULL CONSTRAINT ports_job_id_fkey REFERENCES {s}.jobs ON DELETE CASCADE,
  direction text NOT NULL,
  name text NOT NULL,
  default_value json,
  channels text[] NOT NULL DEFAULT '{{}}',
  packet_limit int,
  received boolean,
  CONSTRAINT ports_job_id_direction_name_key UNIQUE (job_id, direction, name),
  CONSTRAINT ports_direction_check CHECK (direction IN ('in', 'out')),
  CONSTRAINT ports_packet_limit_check CHECK (packet_limit > 0));

CREATE TABLE {s}.subscriptions (
  id bigint GENERATED ALWAYS AS IDENTITY,
  channel text NOT NULL,
  job_id bigint NOT NULL,
  port_id bigint NOT NULL CONSTRAINT subscriptions_port_id_fkey REFERENCES {s}.ports ON DELETE CASCADE,
  CONSTRAINT subscriptions_pkey PRIMARY KEY (channel, job_id, port_id));
CREATE INDEX subscriptions_port_id_idx ON {s}.subscriptions (port_id);

CREATE TABLE {s}.publications (
  id bigint GENERATED ALWAYS AS IDENTITY,
  channel text NOT NULL,
  packets json NOT NULL,
  newest bigint NOT NULL,
  reached bigint NOT NULL DEFAULT 0,
  CONSTRAINT publications_pkey PRIMARY KEY (channel, id)
) WITH (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 1000);

CREATE TABLE {s}.port_waiters (
  port_id bigint NOT NULL CONSTRAINT port_waiters_port_id_fkey REFERENCES {s}.ports ON DELETE CASCADE,
  job_id bigint NOT NULL,
  run_no bigint NOT NULL,
  needs int NOT NULL,
  since timestamptz NOT NULL DEFAULT now(),
  woken_at timestamptz,
  CONSTRAINT port_waiters_pkey PRIMARY KEY (port_id, job_id),
  CONSTRAINT port_waiters_needs_check CHECK (needs > 0)
) WITH (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 1000);
CREATE INDEX port_waiters_job_id_idx ON {s}.port_waiters (job_id);
CREATE INDEX port_waiters_woken_at_idx ON {s}.port_waiters (woken_at) WHERE woken_at IS NOT NULL;

CREATE TABLE {s}.packets (
  id bigint GENERATED ALWAYS AS IDENTITY,
  port_id bigint NOT NULL CONSTRAINT packets_port_id_fkey REFERENCES {s}.ports ON DELETE CASCADE,
  value json NOT NULL,
  context json,
  options json,
  written_at timestamptz NOT NULL DEFAULT now(),
  taken_by bigint,
  taken_run bigint,
  limited boolean,
  CONSTRAINT packets_pkey PRIMARY KEY (port_id, id),
  CONSTRAINT packets_taken_check CHECK ((taken_by IS NULL) = (taken_run IS NULL))
) WITH (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 5000);
CREATE INDEX packets_taken_by_idx ON {s}.packets (taken_by) WHERE taken_by IS NOT NULL;

CREATE TABLE {s}.state (
  job_id bigint NOT NULL CONSTRAINT state_job_id_fkey REFERENCES {s}.jobs ON DELETE CASCADE,
  key text NOT NULL,
  value json NOT NULL,
  CONSTRAINT state_pkey PRIMARY KEY (job_id, key)
) WITH (autovacuum_vacuum_scale_factor = 0.05);

CREATE TABLE {s}.steps (
  id bigint GENERATED ALWAYS AS IDENTITY,
  job_id bigint NOT NULL,
  turn text NOT NULL,
  name text NOT NULL,
  number int NOT NULL,
  kind text NOT NULL,
  run_no bigint NOT NULL,
  done boolean NOT NULL,
  tries int NOT NULL,
  due_at timestamptz,
  value json,
  error json,
  began_at timestamptz,
  took_s double precision,
  worker text,
  CONSTRAINT steps_pkey PRIMARY KEY (job_id, turn, name, number),
  CONSTRAINT steps_kind_check CHECK (kind IN ('step', 'call', 'calls', 'sleep', 'receive', 'since', 'fresh')),
  CONSTRAINT steps_fresh_check CHECK ((kind = 'fresh') = (number = 0)),
  CONSTRAINT steps_error_check CHECK (NOT done OR value IS NULL OR error IS NULL)
) WITH (autovacuum_vacuum_scale_factor = 0.05);

CREATE TABLE {s}.aliases (
  name text CONSTRAINT aliases_pkey PRIMARY KEY,
  job_id bigint NOT NULL CONSTRAINT aliases_job_id_fkey REFERENCES {s}.jobs ON DELETE CASCADE);
CREATE INDEX aliases_job_id_idx ON {s}.aliases (job_id);

CREATE TABLE {s}.tags (
  tag text NOT NULL,
  job_id bigint NOT NULL,
  place bigint GENERATED ALWAYS AS IDENTITY,
  CONSTRAINT tags_pkey PRIMARY KEY (tag, job_id));
CREATE INDEX tags_job_id_idx ON {s}.tags (job_id);

CREATE TABLE {s}.tracked (
  job_id bigint CONSTRAINT tracked_pkey PRIMARY KEY,
  place bigint GENERATED ALWAYS AS IDENTITY CONSTRAINT tracked_place_key UNIQUE);

CREATE TABLE {s}.web_tokens (
  name text CONSTRAINT web_tokens_pkey PRIMARY KEY,
  hash text NOT NULL CONSTRAINT web_tokens_hash_key UNIQUE,
  scopes text[] NOT NULL,
  created_at timestamptz NOT NULL DEFAULT now());

CREATE TABLE {s}.web_answers (
  token text NOT NULL,
  key text NOT NULL,
  request text NOT NULL,
  call text NOT NULL,
  code int,
  answer text,
  made_at timestamptz NOT NULL DEFAULT now(),
  CONSTRAINT web_answers_pkey PRIMARY KEY (token, key),
  CONSTRAINT web_answers_answer_check CHECK ((code IS NULL) = (answer IS NULL)));
CREATE INDEX web_answers_made_at_idx ON {s}.web_answers (made_at);

CREATE TABLE {s}.run_history (
  job_id bigint NOT NULL,
  place int NOT NULL,
  run_no bigint NOT NULL,
  worker text,
  began_at timestamptz,
  ended_at timestamptz NOT NULL,
  how text NOT NULL,
  detail json,
  CONSTRAINT run_history_pkey PRIMARY KEY (job_id, place)
) WITH (fillfactor = 90, autovacuum_vacuum_scale_factor = 0.05);

CREATE TABLE {s}.job_log (
  id bigint GENERATED ALWAYS AS IDENTITY,
  job_id bigint NOT NULL,
  at timestamptz NOT NULL,
  what text NOT NULL,
  run_no bigint,
  worker text,
  detail json,
  CONSTRAINT job_log_pkey PRIMARY KEY (job_id, id)
) WITH (autovacuum_vacuum_scale_factor = 0.05);

CREATE TABLE {s}.task_history (
  id bigint GENERATED ALWAYS AS IDENTITY CONSTRAINT task_history_pkey PRIMARY KEY,
  task_id text NOT NULL,
  task text NOT NULL,
  queue text NOT NULL,
  how text NOT NULL,
  ended_at timestamptz NOT NULL,
  lasted_s double precision NOT NULL
) WITH (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 1000);

CREATE TABLE {s}.results (
  key text CONSTRAINT results_pkey PRIMARY KEY,
  state text NOT NULL,
  body bytea NOT NULL,
  expires_at timestamptz
) WITH (autovacuum_vacuum_scale_factor = 0.05);
CREATE INDEX results_expires_at_idx ON {s}.results (expires_at) WHERE expires_at IS NOT NULL;

CREATE TABLE {s}.chords (
  key text CONSTRAINT chords_pkey PRIMARY KEY,
  size integer,
  more integer NOT NULL DEFAULT 0,
  counted integer NOT NULL DEFAULT 0,
  call bytea,
  send_at timestamptz,
  expires_at timestamptz,
  CONSTRAINT chords_owed_check CHECK ((call IS NULL) = (send_at IS NULL))
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0.05);
CREATE INDEX chords_send_at_idx ON {s}.chords (send_at) WHERE send_at IS NOT NULL;
CREATE INDEX chords_expires_at_idx ON {s}.chords (expires_at) WHERE expires_at IS NOT NULL;

CREATE TABLE {s}.chord_parts (
  chord text NOT NULL CONSTRAINT chord_parts_chord_fkey REFERENCES {s}.chords ON DELETE CASCADE,
  task_id text NOT NULL,
  place double precision NOT NULL,
  body bytea NOT NULL,
  CONSTRAINT chord_parts_pkey PRIMARY KEY (chord, task_id, place)
) WITH (autovacuum_vacuum_scale_factor = 0.05);

CREATE TABLE {s}.broker_queues (
  name text CONSTRAINT broker_queues_pkey PRIMARY KEY,
  transient boolean NOT NULL DEFAULT false,
  unused_s double precision,
  expires_at timestamptz,
  CONSTRAINT broker_queues_expires_check CHECK ((unused_s IS NULL) = (expires_at IS NULL)));
CREATE INDEX broker_queues_expires_at_idx ON {s}.broker_queues (expires_at) WHERE expires_at IS NOT NULL;

CREATE TABLE {s}.broker_bindings (
  exchange text NOT NULL,
  queue text NOT NULL CONSTRAINT broker_bindings_queue_fkey REFERENCES {s}.broker_queues ON DELETE CASCADE,
  routing_key text NOT NULL,
  CONSTRAINT broker_bindings_pkey PRIMARY KEY (exchange, queue, routing_key));
CREATE INDEX broker_bindings_queue_idx ON {s}.broker_bindings (queue);

CREATE TABLE {s}.broker_consumers (
  id bigint GENERATED ALWAYS AS IDENTITY CONSTRAINT broker_consumers_pkey PRIMARY KEY,
  ident text NOT NULL,
  locked boolean NOT NULL DEFAULT false,
  silence_s double precision NOT NULL,
  beat_at timestamptz NOT NULL DEFAULT now()
) WITH (fillfactor = 50);

CREATE TABLE {s}.broker_messages (
  id bigint GENERATED ALWAYS AS IDENTITY CONSTRAINT broker_messages_pkey PRIMARY KEY,
  queue text NOT NULL,
  priority smallint NOT NULL,
  due_at timestamptz,
  holder bigint,
  held_at timestamptz,
  returns int NOT NULL DEFAULT 0,
  deaths int NOT NULL DEFAULT 0,
  headers text,
  properties text,
  body text,
  task_id text,
  generation bigint,
  again boolean NOT NULL DEFAULT false,
  CONSTRAINT broker_messages_priority_check CHECK (priority BETWEEN 0 AND 9),
  CONSTRAINT broker_messages_reference_check
    CHECK ((task_id IS NULL) = (generation IS NULL) AND (task_id IS NULL) = (headers IS NOT NULL)
      AND (task_id IS NULL) = (properties IS NOT NULL) AND (task_id IS NULL) = (body IS NOT NULL)),
  CONSTRAINT broker_messages_held_check
    CHECK ((holder IS NULL) = (held_at IS NULL) AND (holder IS NULL OR due_at IS NULL))
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 1000,
  autovacuum_vacuum_cost_delay = 0);
CREATE INDEX broker_messages_ready_idx ON {s}.broker_messages (queue, priority, id) WHERE due_at IS NULL;
CREATE INDEX broker_messages_due_idx ON {s}.broker_messages (due_at) WHERE due_at IS NOT NULL;
CREATE INDEX broker_messages_task_id_idx ON {s}.broker_messages (task_id) WHERE task_id IS NOT NULL;

CREATE TABLE {s}.broker_dead (
  id bigint GENERATED ALWAYS AS IDENTITY CONSTRAINT broker_dead_pkey PRIMARY KEY,
  queue text NOT NULL,
  priority smallint NOT NULL,
  died_at timestamptz NOT NULL DEFAULT now(),
  reason text NOT NULL,
  headers text NOT NULL,
  properties text NOT NULL,
  body text NOT NULL);

CREATE UNLOGGED TABLE {s}.broker_broadcasts (
  id bigint GENERATED ALWAYS AS IDENTITY CONSTRAINT broker_broadcasts_pkey PRIMARY KEY,
  exchange text NOT NULL,
  routing_key text NOT NULL,
  sent_at timestamptz NOT NULL DEFAULT now(),
  headers text NOT NULL,
  properties text NOT NULL,
  body text NOT NULL
) WITH (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 2000);
"""

BOUNDS = """
DO $$ DECLARE one record; BEGIN FOR one IN
  SELECT c.oid::regclass AS made, c.relname || '_bounds_check' AS name, string_agg(format(CASE
      WHEN a.attidentity = '' AND a.atttypid = 'float8'::regtype THEN '%1$I BETWEEN %2$L::float8 AND %3$L::float8'
      WHEN a.attidentity = '' THEN '%1$I BETWEEN %4$L::timestamptz AND %5$L::timestamptz'
      WHEN c.relname IN ('workers', 'broker_consumers') THEN '%1$I BETWEEN 1 AND %6$s'
      ELSE '%1$I BETWEEN 1 AND %7$s' END, a.attname, '-1e12', '1e12', '0001-01-02 00:00:00+00',
      '9999-12-30 00:00:00+00', 2147483647, 4611686018427387904), ' AND ' ORDER BY a.attnum) AS rule
  FROM pg_class c JOIN pg_attribute a ON a.attrelid = c.oid
  WHERE c.relnamespace = '{s}'::regnamespace AND c.relkind = 'r' AND a.attnum > 0 AND NOT a.attisdropped
    AND a.attname <> 'next_check_at' AND (a.attidentity <> '' OR a.atttypid = 'timestamptz'::regtype
      OR a.atttypid = 'float8'::regtype AND right(a.attname, 2) = '_s')
  GROUP BY c.oid, c.relname
LOOP EXECUTE format('ALTER TABLE %s ADD CONSTRAINT %I CHECK (%s)', one.made, one.name, one.rule); END LOOP; END $$"""
"""Numbers and times with which statements can go on counting, and which Python can read.

The role of the workers may write any row. One with a time of infinity, with the largest number or with a consumer that
is silent for NaN seconds would be an error for everybody who reads it. `next_check_at` is infinity while a message is
held, and read by nobody. Workers' and consumers' numbers are halves of the keys of their locks.
"""

GATES = {"open": 0, "queue": 1, "pool": 2, "worker": 3, "jobs": 4}
STATUSES = ("queued", "running", "suspended", "completed", "failed", "terminating", "terminated")

FEW = (
    ("jobs", "parent_id"),
    ("askings", "job_id"),
    ("timers", "job_id"),
    ("dead", "job_id"),
    ("ports", "job_id"),
    ("subscriptions", "port_id"),
    ("port_waiters", "port_id"),
    ("port_waiters", "job_id"),
    ("packets", "port_id"),
    ("state", "job_id"),
    ("steps", "job_id"),
    ("aliases", "job_id"),
    ("tags", "job_id"),
    ("run_history", "job_id"),
    ("job_log", "job_id"),
)
"""Columns that have another value in every second row, as far as plans are concerned.

Postgres measures how many rows a job or a port has on average. One with a million rows makes Postgres read whole tables
for the children, packets or timers of any other, also where a deletion checks a foreign key. So Postgres is told that
there are few. That holds from the next ANALYZE of a table on, which autovacuum does.
"""


def upgrade() -> None:
    schema = '"' + context.config.attributes["schema"].replace('"', '""') + '"'
    statuses = ", ".join(f"'{status}'" for status in STATUSES)
    for statement in DDL.format(s=schema, statuses=statuses, **GATES).split(";\n"):
        if statement.strip():
            op.execute(text(statement.strip().replace(":", r"\:")))  # a bare `:word` would be a parameter
    op.execute(text(BOUNDS.format(s=schema).replace(":", r"\:")))
    for table, column in FEW:
        op.execute(f"ALTER TABLE {schema}.{table} ALTER COLUMN {column} SET (n_distinct = -0.5)")
    # An ANALYZE that finds no open asking would have each end of a run read all that were opened since.
    op.execute(f"ALTER TABLE {schema}.askings ALTER COLUMN closed_at SET STATISTICS 0")
