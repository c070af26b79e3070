"""What differs between runs of different tasks; the loop is the same for all."""

from vir.checkpoint import Task as TaskName
from vir.train.tasks.base import Task
from vir.train.tasks.classification import Classification
from vir.train.tasks.detection import Detection
from vir.train.tasks.segmentation import Segmentation

TASKS: dict[TaskName, type[Task]] = {
    "classification": Classification,
    "detection": Detection,
    "segmentation": Segmentation,
}
