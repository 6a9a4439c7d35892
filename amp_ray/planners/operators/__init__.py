"""The operator space: stages cut at any operator, planned and scored with measured kernels."""
