/** Metrics of a queue: how many jobs completed and failed, per minute. */
import { addNamed, buryNext, check, completeNext, finish, handWorker, holds, openQueue, queueName, refused, same } from './check';

await check('completed and failed jobs are counted per minute', async () => {
  const name = queueName('count');
  const queue = openQueue(name);
  const worker = handWorker(name);
  await addNamed(queue, ['a', 'b', 'c']);
  await completeNext(queue, worker);
  await completeNext(queue, worker);
  await buryNext(queue, worker);
  const [completed, failed] = [await queue.getMetrics('completed'), await queue.getMetrics('failed')];
  same([completed.meta.count, failed.meta.count], [2, 1], 'totals');
  holds(Array.isArray(completed.data) && completed.data.every(Number.isFinite), `per minute: ${completed.data}`);
  same(completed.count, completed.data.length, 'number of points');
});

await check('a queue without jobs has metrics of zero', async () => {
  const metrics = await openQueue(queueName('empty')).getMetrics('completed');
  same([metrics.meta.count, metrics.data.reduce((sum, value) => sum + value, 0)], [0, 0], 'metrics');
});

await check('another kind of metric is refused', async () => {
  const queue = openQueue(queueName('kind'));
  await refused(queue.getMetrics('waiting' as 'failed'), /Metrics type must be 'completed' or 'failed'/, 'type');
});

finish();
